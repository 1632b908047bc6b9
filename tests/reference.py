"""The row contract in plain loops: what dispatch and combine must give on each rank, from the inputs of all ranks.

Written without the package, so that a mistake there does not repeat itself here. Legend (T, K, H, E, W, R) as in
csrc/ep.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Inputs:
    """What one rank passes to dispatch."""

    hidden_states: torch.Tensor  # [T, *]
    topk_ids: torch.Tensor  # [T, K] int32 or int64
    topk_weights: torch.Tensor | None = None  # [T, K]
    hidden_states_scale: torch.Tensor | None = None  # [T, *]
    eplb_local_stats: torch.Tensor | None = None  # [n] int32


@dataclass
class Received:
    """What one rank gets; rows where ``holds_token`` is False are specified in ``topk_ids`` alone."""

    holds_token: torch.Tensor  # [W*R] bool
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor  # [W*R, K] int32
    topk_weights: torch.Tensor | None
    hidden_states_scale: torch.Tensor | None
    eplb_gathered_stats: torch.Tensor | None  # [W, n] int32


def expert_owners(num_experts: int, ep_size: int) -> list[int]:
    """The rank of every expert: contiguous blocks, the first E mod W ranks own one more."""
    per_rank, wide = divmod(num_experts, ep_size)
    return [rank for rank in range(ep_size) for _ in range(per_rank + (rank < wide))]


def targets(ids: Sequence[int], owners: list[int]) -> list[int]:
    """The distinct ranks of a top-k row, in order of first appearance; ids outside [0, E) select nothing."""
    return list(dict.fromkeys(owners[i] for i in ids if 0 <= i < len(owners)))


def dispatch(
    inputs: list[Inputs], rank: int, tokens_per_rank: int, num_experts: int, invalid_expert_id: int,
    active: Sequence[int] | None = None,
) -> Received:
    """What ``rank`` receives. ``active`` are the ranks that take part, None = all."""
    ep_size, r = len(inputs), tokens_per_rank
    active = range(ep_size) if active is None else active
    owners = expert_owners(num_experts, ep_size)
    mine, top_k = inputs[rank], inputs[rank].topk_ids.shape[1]

    def rows_like(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.zeros(ep_size * r, *tensor.shape[1:], dtype=tensor.dtype)

    out = Received(
        torch.zeros(ep_size * r, dtype=torch.bool),
        torch.zeros(ep_size * r, *mine.hidden_states.shape[1:], dtype=mine.hidden_states.dtype),
        torch.full((ep_size * r, top_k), invalid_expert_id, dtype=torch.int32),
        rows_like(mine.topk_weights),
        rows_like(mine.hidden_states_scale),
        None if mine.eplb_local_stats is None else torch.zeros(ep_size, len(mine.eplb_local_stats), dtype=torch.int32),
    )
    for source, theirs in enumerate(inputs):
        if source not in active or rank not in active:
            continue
        if out.eplb_gathered_stats is not None:
            out.eplb_gathered_stats[source] = theirs.eplb_local_stats
        for t, ids in enumerate(theirs.topk_ids.tolist()):
            if rank not in targets(ids, owners):
                continue
            row = source * r + t
            out.holds_token[row] = True
            out.hidden_states[row] = theirs.hidden_states[t]
            for k, i in enumerate(ids):
                out.topk_ids[row, k] = i if 0 <= i < num_experts else invalid_expert_id
            if out.topk_weights is not None:
                out.topk_weights[row] = theirs.topk_weights[t]
            if out.hidden_states_scale is not None:
                out.hidden_states_scale[row] = theirs.hidden_states_scale[t]
    return out


def combine(
    inputs: list[Inputs], expert_outputs: list[torch.Tensor], rank: int, tokens_per_rank: int, num_experts: int,
    active: Sequence[int] | None = None,
) -> torch.Tensor:
    """What ``rank`` gets back from ``expert_outputs`` (``[W*R, H]`` of each rank)."""
    ep_size = len(inputs)
    active = range(ep_size) if active is None else active
    owners = expert_owners(num_experts, ep_size)
    like = expert_outputs[rank]
    wide = torch.promote_types(like.dtype, torch.float32)
    out = torch.zeros(len(inputs[rank].topk_ids), like.shape[1], dtype=like.dtype)
    for t, ids in enumerate(inputs[rank].topk_ids.tolist()):
        row = rank * tokens_per_rank + t
        partials = [
            expert_outputs[target][row].to(wide)
            for target in targets(ids, owners)
            if target in active and rank in active
        ]
        if partials:
            total = partials[0]
            for partial in partials[1:]:
                total = total + partial
            out[t] = total.to(like.dtype)
    return out


def same_bytes(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit (so NaN equals itself and -0.0 is not 0.0)."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    as_bytes = [tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in (got, expected)]
    return torch.equal(*as_bytes)
