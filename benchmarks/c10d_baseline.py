"""Dispatch and combine by torch.distributed.all_to_all_single: what the one-sided ops are measured against.

Static padded shapes and the row contract of the ops (token t of rank s in row s*R + t; global ids; partials summed in
float32 in the order in which the targets first appear), so results can be compared bit for bit. One collective per
direction: hidden row, ids and weights of a token travel in one record. Send and receive memory is kept across calls
of the same shape, which spares the page faults of fresh buffers; results of a dispatch are views of that memory and
valid until the next one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_moe_ep import MoEEpCommParams


class Received(NamedTuple):
    """What a dispatch returns; rows as in the ops."""

    hidden_states: torch.Tensor  # [W*R, H], rows of a wider record
    topk_ids: torch.Tensor  # [W*R, K] int32
    topk_weights: torch.Tensor  # [W*R, K]
    targets: torch.Tensor  # [M, T] the j-th target rank of every local token
    num_targets: torch.Tensor  # [T]


class _Records:
    """[W, R] records of hidden row, ids and weights, in one buffer of bytes."""

    def __init__(self, ep_size: int, r: int, hidden: torch.Tensor, weights: torch.Tensor) -> None:
        k = weights.shape[1]
        ends = [0, hidden.shape[1] * hidden.element_size()]
        ends += [ends[-1] + k * 4]
        ends += [ends[-1] + k * weights.element_size()]
        self.bytes = torch.zeros(ep_size, r, -(-ends[-1] // 16) * 16, dtype=torch.uint8)
        self.hidden, self.ids, self.weights = (
            self.bytes[..., begin:end].view(dtype)
            for begin, end, dtype in zip(ends, ends[1:], (hidden.dtype, torch.int32, weights.dtype), strict=False)
        )


class C10dAlltoAll:
    """The pair of collectives for one group. ``dispatch`` and ``combine`` take what the ops take."""

    def __init__(self, params: MoEEpCommParams, ep_size: int, group: dist.ProcessGroup | None = None) -> None:
        self.params, self.ep_size, self.group = params, ep_size, group
        per_rank, wide = divmod(params.num_experts, ep_size)
        sizes = torch.tensor([per_rank + 1] * wide + [per_rank] * (ep_size - wide))
        # Owner of each expert; one more entry, ep_size, for ids that select nothing.
        self.owner = torch.cat([torch.repeat_interleave(torch.arange(ep_size), sizes), torch.tensor([ep_size])])
        self._records: dict[tuple[int, torch.dtype, int], tuple[_Records, _Records]] = {}
        self._landing: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def dispatch(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tokens_per_rank: int
    ) -> Received:
        tokens, k = topk_ids.shape
        w, e = self.ep_size, self.params.num_experts
        key = (tokens_per_rank, hidden.dtype, k)
        if key not in self._records:
            make = [_Records(w, tokens_per_rank, hidden, topk_weights) for _ in range(2)]
            self._records[key] = (make[0], make[1])
        send, receive = self._records[key]

        owner = self.owner[torch.where((topk_ids >= 0) & (topk_ids < e), topk_ids, e)]  # [T, K]
        first = torch.full((tokens, w + 1), k)  # [T, W] the place in the top-k where a rank first appears, or K
        first.scatter_reduce_(1, owner, torch.arange(k).expand(tokens, k), "amin")
        first = first[:, :w]
        is_target = first < k
        targets = first.argsort(dim=1)[:, : min(k, w)].t().contiguous()

        send.hidden[:, :tokens] = hidden
        send.ids[:, :tokens] = torch.where(is_target.t()[:, :, None], topk_ids, self.params.invalid_expert_id)
        send.ids[:, tokens:] = self.params.invalid_expert_id
        send.weights[:, :tokens] = topk_weights
        dist.all_to_all_single(receive.bytes, send.bytes, group=self.group)
        return Received(
            receive.hidden.flatten(0, 1),
            receive.ids.flatten(0, 1),
            receive.weights.flatten(0, 1),
            targets,
            is_target.sum(1),
        )

    def combine(self, expert_output: torch.Tensor, received: Received) -> torch.Tensor:
        key = (expert_output.shape, expert_output.dtype)
        if key not in self._landing:
            self._landing[key] = torch.empty(expert_output.shape, dtype=expert_output.dtype)
        landing = self._landing[key]
        dist.all_to_all_single(landing, expert_output, group=self.group)
        tokens_per_rank = expert_output.shape[0] // self.ep_size
        tokens = received.targets.shape[1]
        rows = received.targets * tokens_per_rank + torch.arange(tokens)
        total = landing[rows[0]].float()
        for j in range(1, len(rows)):
            # Adding -0.0 changes no value, not even -0.0; an unused row may hold anything, NaN too.
            unused = (received.num_targets <= j)[:, None]
            total += landing[rows[j]].masked_fill_(unused, -0.0)
        total.masked_fill_((received.num_targets == 0)[:, None], 0.0)
        return total.to(expert_output.dtype)
