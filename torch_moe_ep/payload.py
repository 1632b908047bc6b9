"""What a dispatched token row consists of: the formats of its values and of the scale factors that travel with them."""

from __future__ import annotations

import enum
from typing import NamedTuple


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


class _Format(NamedTuple):
    value_bits: int
    block: int  # values that share one scale factor; 0 = no scale travels with the rows
    scale_bytes: int


# DeepSeekFp8: one float32 per 128 values. MX formats (OCP Microscaling v1.0): one E8M0 byte per 32 values. NVFP4: one
# E4M3 byte per 16 values. A per-tensor scale is a scalar and does not travel with the tokens.
_FORMATS = {
    QuantFormat.BF16: _Format(16, 0, 0),
    QuantFormat.FP16: _Format(16, 0, 0),
    QuantFormat.FP8PerTensor: _Format(8, 0, 0),
    QuantFormat.DeepSeekFp8: _Format(8, 128, 4),
    QuantFormat.MXFP8: _Format(8, 32, 1),
    QuantFormat.NVFP4: _Format(4, 16, 1),
    QuantFormat.MXFP4: _Format(4, 32, 1),
}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def row_bytes(quant_format: QuantFormat, hidden_size: int) -> RowBytes:
    """Bytes of the values and of the scale factors of one row of ``hidden_size`` values.

    Raises ValueError for a format in which activations cannot be dispatched.
    """
    f = _FORMATS.get(quant_format)
    if f is None:
        raise ValueError(
            f"dispatch_format: activations cannot be dispatched as {quant_format}; "
            f"expected one of {', '.join(known.name for known in _FORMATS)}"
        )
    values = ceil_div(hidden_size * f.value_bits, 8)
    return RowBytes(values, ceil_div(hidden_size, f.block) * f.scale_bytes if f.block else 0)
