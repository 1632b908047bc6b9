"""What a dispatched token row consists of: the formats of its values and of the scale factors that travel with them.

:func:`quantize` makes such rows and :func:`dequantize` reads them. Both are a few plain torch operations whose shapes
depend on shapes alone, so that a compiler fuses them with what computes the rows and with what uses them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import torch


class QuantFormat(enum.Enum):
    """Format of activations; names as in ``flashinfer.fused_moe.QuantFormat``.

    ``INT4`` and ``MXINT4`` are formats of weights: no activation is dispatched in them.
    """

    BF16 = "BF16"
    FP16 = "FP16"
    FP8PerTensor = "FP8PerTensor"
    DeepSeekFp8 = "DeepSeekFp8"
    MXFP8 = "MXFP8"
    NVFP4 = "NVFP4"
    MXFP4 = "MXFP4"
    MXINT4 = "MXINT4"
    INT4 = "INT4"


class RowBytes(NamedTuple):
    """Bytes of one token's activations."""

    values: int
    scales: int


_E4M3 = torch.float8_e4m3fn


class _Format(NamedTuple):
    value_bits: int
    value_dtype: torch.dtype
    block: int = 0  # values that share one scale factor; 0 = no scale travels with the rows
    scale_dtype: torch.dtype | None = None
    has_global_scale: bool = False  # a float32 scalar that all ranks know

    @property
    def scale_bytes(self) -> int:
        return self.scale_dtype.itemsize if self.scale_dtype else 0


# DeepSeekFp8: one float32 per 128 values. MX formats (OCP Microscaling v1.0): one E8M0 byte per 32 values. NVFP4: one
# E4M3 byte per 16 values. A per-tensor scale is a scalar and does not travel with the tokens. FP4 values are bytes of
# two, for torch computes nothing in its packed dtype; E8M0 scales are bytes, for Inductor has no E8M0 on CPU.
_FORMATS = {
    QuantFormat.BF16: _Format(16, torch.bfloat16),
    QuantFormat.FP16: _Format(16, torch.float16),
    QuantFormat.FP8PerTensor: _Format(8, _E4M3, has_global_scale=True),
    QuantFormat.DeepSeekFp8: _Format(8, _E4M3, 128, torch.float32),
    QuantFormat.MXFP8: _Format(8, _E4M3, 32, torch.uint8),
    QuantFormat.NVFP4: _Format(4, torch.uint8, 16, _E4M3, has_global_scale=True),
    QuantFormat.MXFP4: _Format(4, torch.uint8, 32, torch.uint8),
}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _format(argument: str, quant_format: QuantFormat) -> _Format:
    f = _FORMATS.get(quant_format)
    if f is None:
        raise ValueError(
            f"{argument}: activations cannot be dispatched as {quant_format}; "
            f"expected one of {', '.join(known.name for known in _FORMATS)}"
        )
    return f


def row_bytes(quant_format: QuantFormat, hidden_size: int) -> RowBytes:
    """Bytes of the values and of the scale factors of one row of ``hidden_size`` values.

    Raises ValueError for a format in which activations cannot be dispatched.
    """
    f = _format("dispatch_format", quant_format)
    values = ceil_div(hidden_size * f.value_bits, 8)
    return RowBytes(values, ceil_div(hidden_size, f.block) * f.scale_bytes if f.block else 0)


# --- Rows of a format -------------------------------------------------------------------------------------------------

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_E4M3_LEAST_NORMAL = 2.0**-6
_FLOAT32_LEAST_NORMAL = 2.0**-126
_FLOAT32_MAX = torch.finfo(torch.float32).max
_E8M0_NAN = 255
# The exponent of the largest power of two that a value holds: 256 in e4m3, 4 in e2m1.
_TOP_EXPONENT = {QuantFormat.MXFP8: 8, QuantFormat.MXFP4: 2}


def quantize(
    hidden_states: torch.Tensor, quant_format: QuantFormat, *, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows in the format in which they are dispatched: ``hidden_states`` and ``hidden_states_scale`` of a dispatch.

    Every block of a row has its own scale, so a row's result depends on that row alone. All arithmetic is float32,
    whatever the input; every value is rounded once, to nearest with ties to even, and saturates.

    Args:
        hidden_states: ``[*, H]`` bfloat16, float16 or float32, any strides.
        quant_format: one in which activations can be dispatched.
        global_scale: one float32 element, g below, on the device of the rows, positive and finite (which is not
            checked, since that would wait for the device). It does not travel with the tokens: every rank passes the
            same one here and to :func:`dequantize`. FP8PerTensor needs it; NVFP4 takes it, None is 1; the others
            have none. See :func:`global_scale_of`.

    Returns:
        ``values, scale``. They do not require grad: nothing flows back through a rounding.

        ============  ===============================  ==================================  ===========================
        format        values                           scale                               scale of a block
        ============  ===============================  ==================================  ===========================
        BF16, FP16    ``[*, H]`` bfloat16, float16     None
        FP8PerTensor  ``[*, H]`` float8_e4m3fn         None                                g
        DeepSeekFp8   ``[*, H]`` float8_e4m3fn         ``[*, ceil(H/128)]`` float32        s = amax / 448
        MXFP8         ``[*, H]`` float8_e4m3fn         ``[*, ceil(H/32)]`` uint8           s = 2^(floor(log2 amax) - 8)
        MXFP4         ``[*, ceil(H/2)]`` uint8         ``[*, ceil(H/32)]`` uint8           s = 2^(floor(log2 amax) - 2)
        NVFP4         ``[*, ceil(H/2)]`` uint8         ``[*, ceil(H/16)]`` float8_e4m3fn   s = g * e4m3(amax / 6 / g)
        ============  ===============================  ==================================  ===========================

        amax is the largest magnitude of the block. The exponent of the MX formats is rounded down, as section 6.3 of
        the OCP Microscaling Formats specification v1.0 has it; their scale s is the byte log2(s) + 127 (E8M0), whose
        view as ``torch.float8_e8m0fnu`` is what torch's scaled matrix products take. A byte of FP4 holds value 2i in
        its low four bits and value 2i+1 in its high ones. Where H is no multiple of the block, the last block is
        shorter; where H is odd, the high bits of the last byte are 0. The sizes are those of :func:`row_bytes`.

    Errors, of ``dequantize(..., dtype=torch.float32)``, for a finite value x:

        e4m3 has 4 significant bits, hence a relative error of at most 2^-4, and steps of 2^-9 below 2^-6, hence an
        absolute one of at most 2^-10. e2m1 has 2 and steps of 1/2 below 1: 1/4 and 1/4. Times the scale, that is
        ``max(|x|/16, s/1024)`` for e4m3 and ``max(|x|/4, s/4)`` for e2m1. Float32 arithmetic and the rounding to
        another dtype (2^-8 relative for bfloat16, 2^-11 for float16) come on top; the former is below 2^-21 of x.

        ============  ==============================  =====================  ===================================
        format        error of x at most              and in terms of amax   saturates
        ============  ==============================  =====================  ===================================
        BF16          ``|x|/256``                                            at the largest bfloat16
        FP16          ``max(|x|/2048, 2^-25)``                               at 65504
        FP8PerTensor  ``max(|x|/16, g/1024)``                                ``|x| > 464 g``, to 448 g
        DeepSeekFp8   ``max(|x|/16, s/1024)``         ``amax/28``            never
        MXFP8         ``max(|x|/8, s/1024)``          ``amax/8``             to 448 s; ``amax < 512 s``
        MXFP4         ``max(|x|/4, s/4)``             ``amax/4``             to 6 s; ``amax < 8 s``
        NVFP4         ``max(|x|/4, s/4)``             ``17/96 amax``         ``amax > 2688 g``, to 2688 g
        ============  ==============================  =====================  ===================================

        In terms of amax: of DeepSeekFp8, half the step of the top binade, 16 of 448; of the MX formats, what saturates
        loses less than 64 of 512 and 2 of 8 (MXFP8 has |x|/16 where nothing saturates, |x| <= 464 s); of NVFP4, half
        a step is at most s, and e4m3 rounds s up to at most 17/16 of amax/6. The line of NVFP4 holds while
        ``6 g / 64 <= amax <= 2688 g``; below, s stays at g/64, which the middle column still covers.

    Special values:

        * A block of zeros gives zeros, with their signs. Its scale is the least that the format has here: 2^-126 of
          DeepSeekFp8, 2^-127 of the MX formats (E8M0 0), 2^-6 g of NVFP4. Smaller scales are replaced by it; so
          subnormal rows keep the bounds above, with this s.
        * A finite value never gives inf or NaN, up to the largest float32.
        * An infinity or NaN makes its whole block NaN through the scale (the bytes of the values are unspecified);
          FP8PerTensor, without a scale, makes that value alone NaN, and BF16 and FP16 keep it.

    Raises:
        TypeError: hidden_states or global_scale has another dtype.
        ValueError: quant_format is one of weights, hidden_states has no dimension, or global_scale is missing, has
            several elements, or is given to a format without one.
    """
    f = _format("quant_format", quant_format)
    if hidden_states.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            f"hidden_states: expected bfloat16, float16 or float32, got {hidden_states.dtype}; convert them first"
        )
    if hidden_states.dim() == 0:
        raise ValueError("hidden_states: expected at least 1 dimension, [*, H], got a scalar")
    g = _check_global_scale(global_scale, quant_format, f)
    x = hidden_states.detach()
    if f.value_bits == 16:
        return _cast(x, f.value_dtype), None
    x, hidden_size = x.float(), x.shape[-1]
    if quant_format is QuantFormat.FP8PerTensor:
        assert g is not None
        return _to_e4m3(torch.where(x.isinf(), torch.nan, x / g)), None

    # Of FP4, the two values of a byte lie in two tensors from here on: their amax and their packing then run over the
    # same indices, which a compiler needs to make them one loop.
    per_byte = 8 // f.value_bits
    block = f.block // per_byte
    width, blocks = ceil_div(hidden_size, per_byte), ceil_div(hidden_size, f.block)
    lanes = _pad_to(x, width * per_byte).unflatten(-1, (width, per_byte)).unbind(-1)
    magnitude = lanes[0].abs() if per_byte == 1 else torch.maximum(lanes[0].abs(), lanes[1].abs())
    amax = _pad_to(magnitude, blocks * block).unflatten(-1, (blocks, block)).amax(-1)

    if quant_format is QuantFormat.DeepSeekFp8:
        scale = torch.where(amax.isinf(), torch.nan, _quotient(amax, _E4M3_MAX).clamp(min=_FLOAT32_LEAST_NORMAL))
        scaled = [_by_block(torch.div, lane, scale, block) for lane in lanes]
    elif quant_format is QuantFormat.NVFP4:
        ideal = _quotient(amax, _E2M1_MAX)
        ideal = ideal if g is None else ideal / g
        ideal = torch.where(amax.isinf(), torch.nan, ideal.clamp(_E4M3_LEAST_NORMAL, _E4M3_MAX))
        scale = ideal.to(_E4M3)
        inverse = (1.0 if g is None else 1.0 / g) / scale.float()
        inverse = inverse.clamp(max=_FLOAT32_MAX)  # of a tiny g; times 0 it must not be NaN
        scaled = [_by_block(torch.mul, lane, inverse, block) for lane in lanes]
    else:
        # The biased exponent of a float32 is that of the E8M0 byte; of infinity and NaN it is E8M0's NaN. A subnormal
        # has 0 and, like all that is too small, gets the least scale. The mask is for NaNs with a sign.
        exponent = amax.view(torch.int32) >> 23 & 255
        biased = (exponent - _TOP_EXPONENT[quant_format]).clamp(min=0)
        scale = torch.where(exponent == 255, _E8M0_NAN, biased).to(torch.uint8)
        inverse = ((254 - biased) << 23).view(torch.float32)  # 2^(127 - biased), always a normal number
        scaled = [_by_block(torch.mul, lane, inverse, block) for lane in lanes]

    if per_byte == 1:
        return _to_e4m3(scaled[0]), scale
    low, high = (_e2m1_code(y, lane) for y, lane in zip(scaled, lanes, strict=True))
    return (low + 16 * high).to(torch.uint8), scale


def dequantize(
    values: torch.Tensor,
    scale: torch.Tensor | None,
    quant_format: QuantFormat,
    hidden_size: int,
    dtype: torch.dtype,
    *,
    global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[*, H]`` rows of ``dtype`` from rows in a format: value times scale in float32, rounded once.

    Rows that hold no token give unspecified numbers, as their bytes are unspecified.

    Args:
        values, scale: as :func:`quantize` returns them, or a dispatch of those; elements of one byte may also come as
            uint8 or, where uint8 is expected, as another dtype of one byte.
        quant_format: that of the values.
        hidden_size: H, which packed values alone do not tell.
        dtype: bfloat16, float16 or float32. What is too large for it saturates.
        global_scale: as passed to :func:`quantize`.

    Raises:
        TypeError, ValueError: an argument does not fit the format; names it.
    """
    f = _format("quant_format", quant_format)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"dtype: expected bfloat16, float16 or float32, got {dtype}; convert the result instead")
    per_byte = 2 if f.value_bits == 4 else 1
    values = _check_part("values", values, f.value_dtype, ceil_div(hidden_size, per_byte), quant_format)
    g = _check_global_scale(global_scale, quant_format, f)
    if f.block == 0 and scale is not None:
        raise ValueError(f"scale: expected None for {quant_format.name}, whose rows carry none")
    if f.value_bits == 16:
        return _cast(values, dtype)
    if f.block == 0:
        assert g is not None
        return _saturate(values.float() * g, dtype)

    assert f.scale_dtype is not None
    if scale is None:
        raise ValueError(f"scale: expected [*, {ceil_div(hidden_size, f.block)}] of {f.scale_dtype}, got None")
    scale = _check_part("scale", scale, f.scale_dtype, ceil_div(hidden_size, f.block), quant_format)
    if values.shape[:-1] != scale.shape[:-1]:
        raise ValueError(
            f"scale: expected one row per row of values, {tuple(values.shape[:-1])}, got {tuple(scale.shape[:-1])}"
        )
    if per_byte == 2:
        shift = 4 * torch.arange(2, dtype=torch.int32, device=values.device)
        x = _from_e2m1_code(values.to(torch.int32).unsqueeze(-1) >> shift & 15).flatten(-2)
        x = x if hidden_size % 2 == 0 else x[..., :-1]
    else:
        x = values.float()
    if f.scale_dtype == torch.uint8:
        # 2^(e - 127) as two factors, both normal numbers for every e: some devices take subnormal ones for 0.
        e = scale.to(torch.int32)
        half = e >> 1
        first, second = ((half + 64) << 23).view(torch.float32), ((e - half + 63) << 23).view(torch.float32)
        second = torch.where(e == _E8M0_NAN, torch.nan, second)
        x = _by_block(torch.mul, _by_block(torch.mul, x, first, f.block), second, f.block)
    else:
        x = _by_block(torch.mul, x, scale.float() if g is None else scale.float() * g, f.block)
    return _saturate(x, dtype)


def global_scale_of(hidden_states: torch.Tensor, quant_format: QuantFormat) -> torch.Tensor:
    """The least ``global_scale`` with which nothing in ``hidden_states`` saturates: a float32 scalar.

    That is amax / 448 for FP8PerTensor and amax / 2688 (448 * 6, so that the largest block's scale is the largest
    e4m3) for NVFP4, and at least 2^-120. The ranks of a group see different rows and need one scale: take the maximum
    over them, ``dist.all_reduce(scale, dist.ReduceOp.MAX)``, or a constant from calibration.

    Args:
        hidden_states: ``[*, H]``, as for :func:`quantize`; without elements it gives 2^-120. Must be finite.
        quant_format: FP8PerTensor or NVFP4.

    Raises:
        ValueError: quant_format has no global scale.
    """
    if not _format("quant_format", quant_format).has_global_scale:
        raise ValueError(f"quant_format: {quant_format.name} has no global scale; expected FP8PerTensor or NVFP4")
    largest = _E4M3_MAX * (_E2M1_MAX if quant_format is QuantFormat.NVFP4 else 1.0)
    amax = torch.nn.functional.pad(hidden_states.detach().flatten().float().abs(), (0, 1)).amax()
    return _quotient(amax, largest).clamp(min=2.0**-120)


def _check_global_scale(
    global_scale: torch.Tensor | None, quant_format: QuantFormat, f: _Format
) -> torch.Tensor | None:
    if global_scale is None:
        if quant_format is QuantFormat.FP8PerTensor:
            raise ValueError("global_scale: FP8PerTensor needs one, a float32 scalar that every rank knows; "
                             "global_scale_of computes it, torch.ones(()) is a plain cast")
        return None
    if not f.has_global_scale:
        raise ValueError(f"global_scale: {quant_format.name} has none; expected None")
    if global_scale.dtype != torch.float32:
        raise TypeError(f"global_scale: expected float32, got {global_scale.dtype}")
    if global_scale.numel() != 1:
        raise ValueError(f"global_scale: expected 1 element, got shape {tuple(global_scale.shape)}")
    return global_scale.detach().reshape(())


def _check_part(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, width: int, quant_format: QuantFormat
) -> torch.Tensor:
    """``tensor`` as ``dtype``."""
    if dtype.itemsize == tensor.dtype.itemsize == 1 and torch.uint8 in (dtype, tensor.dtype):
        tensor = tensor.view(dtype)
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype} for {quant_format.name}, got {tensor.dtype}")
    if tensor.dim() == 0 or tensor.shape[-1] != width:
        raise ValueError(f"{name}: expected [*, {width}] for {quant_format.name} and this hidden_size, "
                         f"got {tuple(tensor.shape)}")
    return tensor


def _quotient(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """``x / divisor``, rounded once: by a number torch on CUDA does not divide, it multiplies with its reciprocal."""
    return x / x.new_full((), divisor)


def _pad_to(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _by_block(
    op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, factor: torch.Tensor, block: int
) -> torch.Tensor:
    """``op`` of every value of ``x`` and the factor of its block, whose size is a power of two.

    Where the last block is short, the factors are indexed, and by a shift: an index i // block, which is also what a
    padded result cut to its width becomes, lets Inductor on CPU split the loop over i without regard to a remainder
    (``try_loop_split`` of torch 2.11 and 2.13), so that the last block is not computed.
    """
    blocks, width = factor.shape[-1], x.shape[-1]
    if width == blocks * block:
        return op(x.unflatten(-1, (blocks, block)), factor.unsqueeze(-1)).flatten(-2)
    return op(x, factor[..., torch.arange(width, device=x.device) >> block.bit_length() - 1])


def _saturate(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Saturates what is finite and keeps what is not."""
    if torch.finfo(dtype).max >= torch.finfo(x.dtype).max:
        return x.to(dtype)
    largest, x = torch.finfo(dtype).max, x.float()  # bfloat16 does not have the largest float16
    return torch.where(x.isinf(), x, x.clamp(-largest, largest)).to(dtype)


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """torch rounds to nearest even; whether it saturates depends on its version."""
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(_E4M3)


def _e2m1_code(y: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """The e2m1 codes, as whole float32 numbers, of the magnitudes of ``y`` with the signs of ``sign``.

    The magnitudes of codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6: in steps of 1/2 up to 2, of 1 up to 4 and of 2 up to
    6. In each range the code is a whole number of steps plus an even number, so rounding to the even number of steps
    is rounding to the even code.
    """
    m = y.abs().nan_to_num(nan=0.0).clamp(max=_E2M1_MAX)
    code = torch.where(m < 2, (m * 2).round(), torch.where(m < 4, m.round() + 2, (m / 2).round() + 4))
    return code + torch.where(sign.signbit(), 8.0, 0.0)


def _from_e2m1_code(code: torch.Tensor) -> torch.Tensor:
    m = (code & 7).float()
    magnitude = torch.where(m < 4, m * 0.5, torch.where(m < 6, m - 2, m * 2 - 8))
    return torch.where(code >= 8, -magnitude, magnitude)
