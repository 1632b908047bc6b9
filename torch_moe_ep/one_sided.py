"""What the one-sided backends share: windows, masks, diagnostics."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from torch_moe_ep import _C
from torch_moe_ep.alternation import AlternatingAlltoAll
from torch_moe_ep.bootstrap import (
    BootstrapConfig,
    SharedWindow,
    WindowSpec,
    close_window,
    open_window,
    resume_window,
    suspend_window,
)
from torch_moe_ep.config import NVLinkOneSidedConfig, ShmOneSidedConfig
from torch_moe_ep.params import MoEEpCommParams
from torch_moe_ep.payload import ceil_div

logger = logging.getLogger("torch_moe_ep")


def _round_up_16(n: int) -> int:
    return ceil_div(n, 16) * 16


class OneSidedAlltoAll(AlternatingAlltoAll):
    """Base of the backends over symmetric windows; use one of its subclasses."""

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: Any,
        device: torch.device,
        namespace: str,
        name_suffix: str,
        low_precision_scales: bool,
        **launch: Any,
    ) -> None:
        super().__init__(bootstrap, params)
        for name, value, most in (
            ("MoEEpCommParams.top_k", params.top_k, _C.MAX_TOP_K),
            ("MoEEpCommParams.max_tokens_per_rank", params.max_tokens_per_rank, _C.MAX_TOKENS),
            ("BootstrapConfig.world_size", bootstrap.world_size, _C.MAX_RANKS),
        ):
            if value > most:
                raise ValueError(f"{name}: {type(self).__name__} takes at most {most}, got {value}")
        self.config: NVLinkOneSidedConfig | ShmOneSidedConfig = config
        self.device = device
        self.timeout_sec = config.timeout_sec
        itemsize = params.token_dtype.itemsize
        wire = "rows"
        if config.use_low_precision_combine:
            wire = "fp8" if low_precision_scales else "fp8_plain"
        spec = WindowSpec(
            backend=self.backend_name,
            device=str(device),
            ep_size=self.ep_size,
            enable_rank_mask=config.enable_rank_mask,
            max_tokens=params.max_tokens_per_rank,
            max_top_k=params.top_k,
            eplb_experts=config.eplb_stats_num_experts,
            weight_itemsize=max(4, itemsize),
            dispatch_row_bytes=_round_up_16(params.dispatch_row.values)
            + _round_up_16(params.dispatch_row.scales)
            + _round_up_16(config.extra_payload_bytes_per_token),
            # Expert outputs come back unquantized, at least 16 bits wide, unless they travel as FP8.
            combine_row_bytes=(
                _round_up_16(max(params.hidden_size * max(itemsize, 2), params.top_k * max(itemsize, 4)))
                if wire == "rows"
                else _C.fp8_row_bytes(params.hidden_size)
            ),
            wire=wire,
            **launch,
        )
        self._window: SharedWindow | None = open_window(
            spec, bootstrap, config.comm_backend, namespace=namespace, name_suffix=name_suffix
        )
        self.comm = self._window.name
        self.order = self._window.order
        if self.ep_rank == 0:
            logger.info("%s: window of %.1f MiB per rank", self.comm, self.window_bytes / 2**20)

    def _check_mask(self, active_rank_mask: torch.Tensor | None) -> None:
        if active_rank_mask is not None and not self.config.enable_rank_mask:
            raise ValueError("active_rank_mask: needs a config with enable_rank_mask=True")

    def active_rank_mask(self, active_ranks: Sequence[int]) -> torch.Tensor:
        """CPU uint64 ``[ceil(W/64)]`` mask with the bits of ``active_ranks`` set."""
        words = [0] * ceil_div(self.ep_size, 64)
        for rank in active_ranks:
            if not 0 <= rank < self.ep_size:
                raise ValueError(f"active_ranks: expected ranks in 0..{self.ep_size - 1}, got {rank}")
            words[rank // 64] |= 1 << rank % 64
        return torch.tensor(words, dtype=torch.uint64)

    def set_active_ranks(self, active_ranks: Sequence[int]) -> None:
        """Masks ranks for every later step that passes no ``active_rank_mask``. Needs ``enable_rank_mask=True``."""
        self._require_live()
        _C.set_active_ranks(self.comm, list(active_ranks))

    @property
    def window_bytes(self) -> int:
        """Bytes of this rank's symmetric window: C*B + C*min(K, W)*H*itemsize and the routing (csrc/window.h)."""
        return self.describe()["window_bytes"]

    def describe(self) -> dict[str, Any]:
        """Sizes and state of the communicator, for people."""
        self._require_live()
        return _C.describe(self.comm)

    def last_error(self) -> str | None:
        """The sentence of the failure after which this communicator cannot be used again, or None."""
        return self.describe()["last_error"] or None

    def checkpoint_prepare(self) -> None:
        """Gives this window's physical memory back before a checkpoint and keeps every address, so that captured graphs
        survive. Collective; call it with no op running. GPU windows of kind ``fabric`` and ``posix_fd`` can do this.

        Raises RuntimeError on every rank alike where the memory cannot.
        """
        self._require_live()
        assert self._window is not None
        suspend_window(self._window)

    def checkpoint_restore(self) -> None:
        """After a checkpoint: fresh memory behind the same addresses. Collective; rounds go on where they were."""
        self._require_live()
        assert self._window is not None
        resume_window(self._window)

    def destroy(self) -> None:
        """Gives up this object's use of the window; the last user frees it. Idempotent; call it on every rank."""
        if self._window is not None:
            close_window(self._window)
        self._window = None
        self._mark_destroyed()
