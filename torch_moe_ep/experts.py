"""The experts of one rank: rows put in the order of their experts, grouped matrix products over them, and the way back.

Letters beside those of the README: N = W*R received rows, L experts of this rank, S = N*min(K, L) slots, F inner size.
Everything here has sizes that depend on integers alone and never asks the device for a number, so that it traces as one
graph and is recorded in CUDA graphs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable


class ExpertMajor(NamedTuple):
    """Where every (row, local expert) pair lies when pairs are sorted by expert, and by row within an expert.

    The pairs fill slots 0 to ``offsets[-1] - 1``; there are S slots, as many as there can be pairs.
    """

    source_rows: torch.Tensor  # [S] int64: the row of a slot; 0 in a slot without a pair
    offsets: torch.Tensor  # [L] int32: the first slot after those of expert e, as grouped matrix products take it
    positions: torch.Tensor  # [N, K] int64: the slot of a pair, -1 = none. An expert named twice by a row has one slot


def expert_major(local_ids: torch.Tensor, num_local_experts: int) -> ExpertMajor:
    """Sorts the pairs of a rank by expert, without a sort: slots are counted by one cumulative sum over ``[L, N]``.

    Args:
        local_ids: ``[N, K]`` int32 or int64 in ``[0, num_local_experts)``; -1 = not an expert of this rank.
        num_local_experts: L, at least 1.

    Example: ids ``[[1, 0], [-1, -1], [-1, 1]]`` of two experts give ``source_rows`` ``[0, 0, 2, 0, 0, 0]`` (expert 0
    has row 0, expert 1 rows 0 and 2, three slots are empty), ``offsets`` ``[1, 3]`` and ``positions``
    ``[[1, 0], [-1, -1], [-1, 2]]``.

    Raises ValueError if local_ids is no matrix of ints or num_local_experts no positive int.
    """
    if local_ids.dim() != 2 or local_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"local_ids: expected an int32 or int64 tensor [N, K], got {local_ids.dtype} of shape "
            f"{tuple(local_ids.shape)}"
        )
    if num_local_experts < 1:
        raise ValueError(f"num_local_experts: expected at least 1, got {num_local_experts}")
    rows, k = local_ids.shape
    experts, device = num_local_experts, local_ids.device
    ids = local_ids.long()
    here = ids >= 0
    # Column L takes the ids of other ranks' experts and is cut off; equal ids of a row set the same place.
    named = torch.zeros(rows, experts + 1, dtype=torch.bool, device=device)
    named = named.scatter(1, torch.where(here, ids, experts), True)[:, :experts].t()
    pairs_until = named.flatten().cumsum(0, dtype=torch.int32)  # [L*N], expert by expert
    slots = rows * min(k, experts)
    # Slot s belongs to the first place of [L, N] at which s + 1 pairs have been counted; L*N where there is none.
    places = torch.searchsorted(pairs_until, torch.arange(1, slots + 1, dtype=torch.int32, device=device))
    row_numbers = torch.arange(rows, device=device).unsqueeze(1)
    positions = pairs_until[torch.where(here, ids * rows + row_numbers, 0)].long() - 1
    return ExpertMajor(places % rows, pairs_until.view(experts, rows)[:, -1].contiguous(),
                       torch.where(here, positions, -1))


def take_rows(rows: torch.Tensor, layout: ExpertMajor) -> torch.Tensor:
    """``[N, D]`` rows copied to their slots: ``[S, D]``; zeros in slots without a pair, so nothing unspecified gets in.

    Differentiable; the gradient of a row is the float32 sum over its slots, in the order of its ids.
    """
    return _TakeRows.apply(rows, *layout)


def sum_slots(slots: torch.Tensor, weights: torch.Tensor, layout: ExpertMajor) -> torch.Tensor:
    """The weighted sum of each row's slots: ``[S, D]`` and ``[N, K]`` give ``[N, D]`` of the dtype of ``slots``.

    Summed in float32 (float64 for float64 slots) in the order of the row's ids and rounded once: the same bits on every
    run. A row without a pair gives zeros. Slots without a pair are not read. Differentiable in slots and weights.
    """
    return _SumSlots.apply(slots, weights, *layout)


def _sum_type(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _as_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Not `to` alone: where it has nothing to do, its result is its argument, and torch 2.11 compiles a Function whose
    # result is also an intermediate of it with a gradient of zeros.
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _read(slots: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The slots at ``position`` ``[N]`` in the type of sums; zeros where it is -1."""
    read = _as_type(slots[position.clamp(min=0)], _sum_type(slots))
    return torch.where(position.unsqueeze(1) >= 0, read, 0)


def _has_pair(source_rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return (torch.arange(source_rows.shape[0], device=offsets.device) < offsets[-1]).unsqueeze(1)


class _TakeRows(torch.autograd.Function):
    """Both directions only read by index: no atomic additions, whose order would change from run to run."""

    @staticmethod
    def forward(ctx, rows, source_rows, offsets, positions):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(positions)
        return torch.where(_has_pair(source_rows, offsets), rows[source_rows], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (positions,) = ctx.saved_tensors
        total = _read(grad, positions[:, 0])
        for k in range(1, positions.shape[1]):
            again = (positions[:, :k] == positions[:, k : k + 1]).any(1)  # this slot has been added
            total = total + _read(grad, torch.where(again, -1, positions[:, k]))
        return _as_type(total, grad.dtype), None, None, None


class _SumSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx, slots, weights, source_rows, offsets, positions):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slots, weights, source_rows, positions)
        total = _read(slots, positions[:, 0]) * weights[:, 0:1]
        for k in range(1, positions.shape[1]):
            total = total + _read(slots, positions[:, k]) * weights[:, k : k + 1]
        return _as_type(total, slots.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        slots, weights, source_rows, positions = ctx.saved_tensors
        grad_slots = grad_weights = None
        wide = _sum_type(slots)
        if ctx.needs_input_grad[0]:
            numbers = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1)
            weight = torch.where(positions[source_rows] == numbers, weights[source_rows], 0).sum(1, keepdim=True)
            # Of a slot without a pair, the weight is 0.
            grad_slots = _as_type(_as_type(grad[source_rows], wide) * weight, slots.dtype)
        if ctx.needs_input_grad[1]:
            columns = [(_read(slots, column) * grad).sum(1) for column in positions.unbind(1)]
            grad_weights = _as_type(torch.stack(columns, 1), weights.dtype)
        return grad_slots, grad_weights, None, None, None


# --- Grouped matrix products ------------------------------------------------------------------------------------------


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each slot times the matrix of its expert: ``[S, M]`` and ``[L, P, M]`` give ``[S, P]``.

    torch's grouped kernel for bfloat16 on CUDA whose sizes are multiples of 8 (16 bytes); elsewhere an op that loops
    over the experts. Slots from ``offsets[-1]`` on are unspecified in the result and in the gradient of ``rows``, and
    have no part in the gradient of ``weight``.
    """
    if native_grouped_mm(weight):
        return nn.functional.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)
    return _looped_mm(rows, weight, offsets)


def native_grouped_mm(weight: torch.Tensor) -> bool:
    """Whether torch's grouped kernel takes ``[L, P, M]`` weights."""
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % 8 == 0
        and weight.shape[2] % 8 == 0
    )


FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(FP8).max


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[S, M]`` as e4m3 values and a float32 scale per row ``[S]``: the largest magnitude of a row becomes 448."""
    wide = rows.float()
    scale = wide.abs().amax(1).clamp(min=1e-12) / _FP8_MAX
    return (wide / scale.unsqueeze(1)).clamp(-_FP8_MAX, _FP8_MAX).to(FP8), scale


def scaled_grouped_mm(
    rows: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """:func:`grouped_mm` of rows quantized by :func:`quantize_rows` and e4m3 weights; not differentiable.

    Args:
        rows: ``[S, M]``; the result has their dtype.
        weight: ``[L, P, M]`` float8_e4m3fn.
        weight_scale: ``[L, P]`` float32: weight times scale is what it stands for.

    ``torch._scaled_grouped_mm`` on CUDA of compute capability 9.x, where sizes are multiples of 16 and rows bfloat16;
    elsewhere the same products of the same rounded numbers in float32.
    """
    values, scale = quantize_rows(rows)
    if (
        weight.is_cuda
        and rows.dtype == torch.bfloat16
        and weight.shape[1] % 16 == 0
        and weight.shape[2] % 16 == 0
        and hasattr(torch, "_scaled_grouped_mm")
        and _capability(weight.device) == 9
    ):
        return torch._scaled_grouped_mm(
            values, weight.transpose(1, 2), scale, weight_scale, offs=offsets, out_dtype=rows.dtype,
            use_fast_accum=True,
        )
    wide = weight.float() * weight_scale.unsqueeze(2)
    return _looped_mm(values.float() * scale.unsqueeze(1), wide, offsets).to(rows.dtype)


@torch.compiler.assume_constant_result
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _expert_of_slot(offsets: torch.Tensor, slots: int) -> torch.Tensor:
    """``[S, 1]``; L where there is no pair."""
    numbers = torch.arange(slots, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets, numbers, right=True).unsqueeze(1)


# A CPU tells the offsets for nothing, so that only what is needed is computed. A GPU would have to be waited for: there
# every expert computes on every slot. As an op the loop is one node of a graph.
@torch.library.custom_op("moe_ep_experts::grouped_mm", mutates_args=())
def _looped_mm(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    if rows.is_cpu:
        begin = 0
        for expert, end in enumerate(offsets.tolist()):
            out[begin:end] = rows[begin:end] @ weight[expert].t()
            begin = end
        return out
    owner = _expert_of_slot(offsets, rows.shape[0])
    for expert in range(weight.shape[0]):
        out = torch.where(owner == expert, rows @ weight[expert].t(), out)
    return out


@_looped_mm.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("moe_ep_experts::grouped_mm_weight_grad", mutates_args=())
def _looped_weight_grad(grad: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``[L, P, M]`` from ``[S, P]`` and ``[S, M]``."""
    out = rows.new_zeros(offsets.shape[0], grad.shape[1], rows.shape[1])
    if rows.is_cpu:
        begin = 0
        for expert, end in enumerate(offsets.tolist()):
            out[expert] = grad[begin:end].t() @ rows[begin:end]
            begin = end
        return out
    owner = _expert_of_slot(offsets, rows.shape[0])
    for expert in range(offsets.shape[0]):
        mine = owner == expert
        out[expert] = torch.where(mine, grad, 0).t() @ torch.where(mine, rows, 0)
    return out


@_looped_weight_grad.register_fake
def _(grad: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(offsets.shape[0], grad.shape[1], rows.shape[1])


def _keep_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _looped_backward(ctx, grad):  # type: ignore[no-untyped-def]
    rows, weight, offsets = ctx.saved_tensors
    grad_rows = _looped_mm(grad, weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
    grad_weight = _looped_weight_grad(grad, rows, offsets) if ctx.needs_input_grad[1] else None
    return grad_rows, grad_weight, None


_looped_mm.register_autograd(_looped_backward, setup_context=_keep_for_backward)


# --- Experts ----------------------------------------------------------------------------------------------------------


class IdentityExperts(nn.Module):
    """Every expert returns its row, so that a token comes home times the sum of its weights. For tests."""

    def forward(self, rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See :class:`GroupedSwiGLU`."""
        return (rows * weights.sum(1, keepdim=True)).to(rows.dtype)


class GroupedSwiGLU(nn.Module):
    """The experts ``w2 @ (silu(gate) * up)``, with gate and up the two halves of ``w13 @ x``, as grouped products.

    Args:
        w13: ``[L, 2*F, H]``. A Parameter stays the object it is; of another tensor one is made over the same memory,
            which requires grad if the tensor does.
        w2: ``[L, H, F]``.
        w13_scale: ``[L, 2*F]`` float32, for ``w13`` in float8_e4m3fn: :func:`scaled_grouped_mm` computes the products,
            for inference only. With ``w2_scale`` or neither.
        w2_scale: ``[L, H]`` float32, for ``w2`` in float8_e4m3fn.
        gate_first: whether the first F rows of ``w13`` are the gate and the last F are up; False is up before gate, the
            order of FlashInfer.

    Raises ValueError if shapes or dtypes do not fit each other.
    """

    skips_empty_rows = True
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None

    def __init__(
        self,
        w13: torch.Tensor,
        w2: torch.Tensor,
        w13_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
        *,
        gate_first: bool = False,
    ) -> None:
        super().__init__()
        if w13.dim() != 3 or w2.dim() != 3 or w13.shape != (w2.shape[0], 2 * w2.shape[2], w2.shape[1]):
            raise ValueError(
                "w13, w2: expected [L, 2*F, H] and [L, H, F] (local experts, inner size, hidden size), got "
                f"{tuple(w13.shape)} and {tuple(w2.shape)}"
            )
        if (w13_scale is None) != (w2_scale is None):
            raise ValueError("w13_scale, w2_scale: expected both or neither")
        for name, weight, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
            if (weight.dtype == FP8) != (scale is not None):
                raise ValueError(
                    f"{name}: expected {FP8} with {name}_scale, or another dtype without it, got {weight.dtype}"
                )
            if scale is not None and (scale.shape != weight.shape[:2] or scale.dtype != torch.float32):
                raise ValueError(
                    f"{name}_scale: expected float32 of shape {tuple(weight.shape[:2])}, a scale per row of {name}, "
                    f"got {scale.dtype} of shape {tuple(scale.shape)}"
                )
        self.w13, self.w2, self.gate_first = _as_parameter("w13", w13), _as_parameter("w2", w2), gate_first
        self.register_buffer("w13_scale", w13_scale)
        self.register_buffer("w2_scale", w2_scale)

    def forward(self, rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What this rank's experts make of the received rows, weighted and summed.

        Args:
            rows: ``[N, H]``; unspecified where a row holds no token.
            local_ids: ``[N, K]`` int32, -1 = not an expert of this rank.
            weights: ``[N, K]``, 0 where local_ids is -1.

        Returns:
            ``[N, H]``; zeros where a row names no expert of this rank.
        """
        if self.w13_scale is not None:
            if rows.requires_grad and torch.is_grad_enabled():
                raise RuntimeError("GroupedSwiGLU: FP8 weights are for inference; expected torch.no_grad() or rows "
                                   "that do not require grad")
        elif rows.dtype != self.w13.dtype:
            raise ValueError(f"GroupedSwiGLU: expected rows of the weights' dtype {self.w13.dtype}, got {rows.dtype}")
        if self.w13.shape[0] == 0:
            # No token comes here. The result still depends on whatever wants gradients: the backward of combine is a
            # collective that no rank may leave out.
            nothing = self.w13.flatten().to(rows.dtype).sum() + self.w2.flatten().to(rows.dtype).sum()
            return torch.where(local_ids[:, :1] >= 0, rows, 0) + nothing
        layout = expert_major(local_ids, self.w13.shape[0])
        slots = take_rows(rows, layout)
        first, second = _product(slots, self.w13, self.w13_scale, layout.offsets).chunk(2, dim=1)
        gate, up = (first, second) if self.gate_first else (second, first)
        inner = nn.functional.silu(gate) * up
        return sum_slots(_product(inner, self.w2, self.w2_scale, layout.offsets), weights, layout)


def _product(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, offsets: torch.Tensor
) -> torch.Tensor:
    return grouped_mm(rows, weight, offsets) if scale is None else scaled_grouped_mm(rows, weight, scale, offsets)


def _as_parameter(name: str, tensor: torch.Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    if not tensor.is_leaf:
        raise ValueError(f"{name}: expected a leaf tensor or a Parameter, got the result of {tensor.grad_fn}; a module "
                         "that computes its weights is passed as the kernel")
    return nn.Parameter(tensor, requires_grad=tensor.requires_grad)
