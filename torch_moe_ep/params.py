"""Sizes of an expert-parallel group, shared by every backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_moe_ep.payload import QuantFormat, RowBytes, row_bytes


@dataclass(frozen=True)
class MoEEpCommParams:
    """Sizes every communication backend needs.

    Args:
        num_experts: E, experts of the layer over all ranks. Need not divide by the number of ranks.
        top_k: K, experts each token selects.
        max_tokens_per_rank: C, the most tokens any rank dispatches in one step; sizes the windows.
        hidden_size: H, elements of an unquantized token row, which is also what ``combine`` takes.
        dtype: of an unquantized row; None is bfloat16.
        dispatch_format: the :class:`QuantFormat` in which rows are dispatched; None dispatches ``dtype`` rows.
        invalid_expert_id: every id of a received row that holds no token; must lie outside ``[0, num_experts)``.

    Raises:
        TypeError: dtype is no torch.dtype, dispatch_format no QuantFormat, invalid_expert_id no int.
        ValueError: a size is no positive int, or out of range; the text names the field.
    """

    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: torch.dtype | None = None
    dispatch_format: QuantFormat | None = None
    invalid_expert_id: int = -1

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "max_tokens_per_rank", "hidden_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"MoEEpCommParams.{name}: expected a positive int, got {value!r}")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"MoEEpCommParams.top_k: expected at most num_experts = {self.num_experts}, got {self.top_k}"
            )
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"MoEEpCommParams.dtype: expected a torch.dtype or None, got {self.dtype!r}")
        if not isinstance(self.invalid_expert_id, int) or isinstance(self.invalid_expert_id, bool):
            raise TypeError(f"MoEEpCommParams.invalid_expert_id: expected an int, got {self.invalid_expert_id!r}")
        if not -(2**31) <= self.invalid_expert_id < 2**31:
            raise ValueError(
                f"MoEEpCommParams.invalid_expert_id: expected a 32-bit value, got {self.invalid_expert_id}"
            )
        if 0 <= self.invalid_expert_id < self.num_experts:
            raise ValueError(
                "MoEEpCommParams.invalid_expert_id: expected a value outside "
                f"[0, num_experts={self.num_experts}), got {self.invalid_expert_id}"
            )
        if self.dispatch_format is not None:
            if not isinstance(self.dispatch_format, QuantFormat):
                raise TypeError(
                    f"MoEEpCommParams.dispatch_format: expected a QuantFormat or None, got {self.dispatch_format!r}"
                )
            row_bytes(self.dispatch_format, self.hidden_size)

    @property
    def token_dtype(self) -> torch.dtype:
        """``dtype``, or bfloat16 where none was given."""
        return torch.bfloat16 if self.dtype is None else self.dtype

    @property
    def dispatch_row(self) -> RowBytes:
        """Bytes of one dispatched row: values and scale factors apart."""
        if self.dispatch_format is None:
            return RowBytes(self.hidden_size * self.token_dtype.itemsize, 0)
        return row_bytes(self.dispatch_format, self.hidden_size)

    @property
    def dispatch_bytes_per_token(self) -> int:
        """B, bytes of one token's dispatched activations, scale factors included."""
        return sum(self.dispatch_row)

    def local_experts(self, rank: int, ep_size: int) -> range:
        """Global ids of the experts that ``rank`` owns: contiguous blocks, the first ``E mod W`` ranks own one more.

        >>> MoEEpCommParams(10, 2, 8, 16).local_experts(1, 4)
        range(3, 6)
        """
        per_rank, wide = divmod(self.num_experts, ep_size)
        first = rank * per_rank + min(rank, wide)
        return range(first, first + per_rank + (rank < wide))
