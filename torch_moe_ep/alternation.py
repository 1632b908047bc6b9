"""What the communication classes share: one combine after each dispatch, over the functions of functional.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torch_moe_ep import functional
from torch_moe_ep.bootstrap import BootstrapConfig
from torch_moe_ep.communication import MoEEpCommunication, MoEEpDispatchResult
from torch_moe_ep.params import MoEEpCommParams


class AlternatingAlltoAll(MoEEpCommunication):
    """Base of the backends of this package; a subclass sets ``comm``, ``order`` and ``device``."""

    device: torch.device

    def __init__(self, bootstrap: BootstrapConfig, params: MoEEpCommParams) -> None:
        super().__init__(bootstrap, params)
        self._destroyed = False
        self._routing: torch.Tensor | None = None  # between dispatch and combine: the routing of the dispatch
        self._num_tokens = 0

    def __copy__(self) -> AlternatingAlltoAll:
        return self  # it stands for what it shares with its peers: of such a thing there is no second one

    def __deepcopy__(self, memo: dict[int, Any]) -> AlternatingAlltoAll:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be pickled; create one in each process")

    def _require_live(self) -> None:
        if self._destroyed:
            raise RuntimeError(f"{type(self).__name__} has been destroyed; create a new one")

    def _mark_destroyed(self) -> None:
        self._destroyed = True
        self._routing = None
        # A process group's threads end with its last reference, and at exit they must have ended.
        self.bootstrap = replace(self.bootstrap, process_group=None, tcp_store=None)

    def _check_mask(self, active_rank_mask: torch.Tensor | None) -> None:
        """Raises where the configuration allows no mask."""

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> MoEEpDispatchResult:
        """See :meth:`MoEEpCommunication.dispatch`.

        ``active_rank_mask``, where the backend has masks, is a CPU uint64 ``[ceil(W/64)]`` mask, as
        ``active_rank_mask()`` of the one-sided backends makes it: tokens for a masked rank are dropped, nothing is sent
        to it or awaited from it. Needs ``enable_rank_mask=True``.
        """
        self._require_live()
        if self._routing is not None:
            raise RuntimeError("dispatch called twice without an intervening combine")
        self._check_mask(active_rank_mask)
        capacity = self.params.max_tokens_per_rank
        tokens_per_rank = capacity if runtime_max_tokens_per_rank is None else runtime_max_tokens_per_rank
        if tokens_per_rank <= 0 or tokens_per_rank > capacity:
            raise ValueError(
                f"runtime_max_tokens_per_rank: expected 1..{capacity} (max_tokens_per_rank), got {tokens_per_rank}"
            )
        out = functional.dispatch(
            self,
            hidden_states,
            topk_ids,
            topk_weights,
            hidden_states_scale=hidden_states_scale,
            tokens_per_rank=tokens_per_rank,
            eplb_local_stats=eplb_local_stats,
            active_rank_mask=active_rank_mask,
        )
        self._routing = out.routing
        self._num_tokens = hidden_states.shape[0]
        return MoEEpDispatchResult(
            hidden_states=out.hidden_states,
            topk_ids=out.topk_ids,
            topk_weights=out.topk_weights,
            tokens_per_rank=tokens_per_rank,
            hidden_states_scale=out.hidden_states_scale,
            eplb_gathered_stats=out.eplb_gathered_stats,
        )

    def combine(
        self,
        expert_output: torch.Tensor,
        *,
        output: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :meth:`MoEEpCommunication.combine`. ``active_rank_mask`` must be that of the dispatch."""
        self._require_live()
        if self._routing is None:
            raise RuntimeError("combine called before dispatch")
        self._check_mask(active_rank_mask)
        if expert_output.dim() not in (2, 3):
            raise ValueError(f"expert_output: expected 2 or 3 dimensions, got shape {tuple(expert_output.shape)}")
        result = functional.combine(
            self,
            expert_output,
            self._routing,
            num_tokens=self._num_tokens,
            active_rank_mask=active_rank_mask,
            out=output,
        )
        self._routing = None
        return result

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """A fresh ``[W*R, H]`` tensor. Combine reads its input where it lies, so any other tensor serves as well."""
        if self._routing is None:
            raise RuntimeError("get_combine_input_buffer called before dispatch")
        rows = self.ep_size * self._routing.shape[1]
        return torch.empty(rows, self.params.hidden_size, dtype=dtype, device=self.device)
