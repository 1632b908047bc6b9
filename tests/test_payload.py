"""quantize and dequantize against float64, against torchao, compiled, and around a dispatch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import backend_config
from ranks import Rank, RankPool
from tiny_model import PATIENCE
from torch._dynamo.utils import counters

import torch_moe_ep
from torch_moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    QuantFormat,
    create_communication,
    dequantize,
    global_scale_of,
    quantize,
)
from torch_moe_ep.payload import row_bytes

Q = QuantFormat
FORMATS = [Q.BF16, Q.FP16, Q.FP8PerTensor, Q.DeepSeekFp8, Q.MXFP8, Q.MXFP4, Q.NVFP4]
BLOCKS = {Q.DeepSeekFp8: 128, Q.MXFP8: 32, Q.MXFP4: 32, Q.NVFP4: 16}
E4M3 = {Q.FP8PerTensor, Q.DeepSeekFp8, Q.MXFP8}
INPUTS = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 31, 37, 128, 200, 512]
DATA = ["normal", "uniform", "wide", "negative", "ties"]
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def make_rows(data: str, count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(width)
    normal = torch.randn(count, width, generator=g)
    match data:
        case "normal":
            x = normal
        case "uniform":
            x = torch.rand(count, width, generator=g) * 2 - 1
        case "wide":  # elements of a block, and blocks, of very different magnitudes
            x = normal * 2.0 ** torch.randint(-12, 13, (count, width), generator=g)
        case "negative":
            x = -normal.abs() - 2
        case "ties":  # halfway between two e4m3 numbers, or two e2m1 numbers, once divided by a power of two
            x = torch.randint(-31, 32, (count, width), generator=g) * 0.25
    return x.to(dtype)


def global_scale_for(x: torch.Tensor, fmt: QuantFormat) -> torch.Tensor | None:
    return global_scale_of(x, fmt) if fmt in (Q.FP8PerTensor, Q.NVFP4) else None


# --- The formats once more, in float64 --------------------------------------------------------------------------------

E2M1_TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3_TABLE = np.array(
    [(mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
     for exponent in range(16) for mantissa in range(8)][:-1]  # the last code is NaN
)  # fmt: skip


def nearest_code(magnitudes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Of the nearest number in ``table``, of the even code where two are equally near."""
    distance = np.abs(np.minimum(magnitudes, table[-1])[..., None] - table)
    nearest = distance.argmin(-1)  # the lower of two
    above = np.minimum(nearest + 1, len(table) - 1)
    tie = np.take_along_axis(distance, nearest[..., None], -1) == np.take_along_axis(distance, above[..., None], -1)
    return np.where(tie[..., 0] & (nearest % 2 == 1), above, nearest)


def expected_rows(
    x: torch.Tensor, fmt: QuantFormat, g: torch.Tensor | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes with their signs ``[T, H]``, scale factors ``[T, n]`` as bytes or float32, and what the rows mean, in
    float64: from the table of the docstring, block by block."""
    rows = x.float().numpy()
    count, width = rows.shape
    block = BLOCKS.get(fmt, width)
    table = E4M3_TABLE if fmt in E4M3 else E2M1_TABLE
    g32 = np.float32(1) if g is None else np.float32(g.item())
    codes, meaning = np.zeros((count, width), np.uint8), np.zeros((count, width))
    scales: list[list[float]] = []
    for t in range(count):
        scales.append([])
        for start in range(0, width, block):
            part = rows[t, start : start + block]
            amax = np.abs(part).max()
            match fmt:
                case Q.FP8PerTensor:
                    stored, s, scaled = 0, float(g32), part / g32
                case Q.DeepSeekFp8:
                    stored = max(amax / np.float32(448), np.float32(2.0**-126))
                    s, scaled = float(stored), part / stored
                case Q.MXFP8 | Q.MXFP4:
                    top = 8 if fmt is Q.MXFP8 else 2
                    log2 = -127 if amax == 0 else max(math.frexp(amax)[1] - 1 - top, -127)
                    stored, s, scaled = log2 + 127, 2.0**log2, part.astype(np.float64) / 2.0**log2
                case Q.NVFP4:
                    ideal = min(max(amax / np.float32(6) / g32, np.float32(2.0**-6)), np.float32(448))
                    stored = nearest_code(np.array(ideal, np.float64), E4M3_TABLE)
                    e4m3 = np.float32(E4M3_TABLE[stored])
                    s, scaled = float(e4m3 * g32), part * (np.float32(1) / g32 / e4m3)
            code = nearest_code(np.abs(scaled).astype(np.float64), table)
            codes[t, start : start + block] = code + np.signbit(part) * (128 if fmt in E4M3 else 8)
            meaning[t, start : start + block] = np.where(np.signbit(part), -1, 1) * table[code] * s
            scales[-1].append(stored)
    return codes, np.array(scales), meaning


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of tensors without NaN, or of one byte per element."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype.itemsize == 1 else torch.equal(a, b)


def unpack(values: torch.Tensor, width: int, fmt: QuantFormat) -> np.ndarray:
    bytes_ = values.cpu().view(torch.uint8).numpy()
    return bytes_ if fmt in E4M3 else np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(len(bytes_), -1)[:, :width]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f not in (Q.BF16, Q.FP16)], ids=lambda fmt: fmt.name)
def test_every_bit_is_that_of_the_definition(device: str, fmt: QuantFormat, width: int, data: str) -> None:
    for dtype in INPUTS:
        x = make_rows(data, 5, width, dtype)
        g = global_scale_for(x, fmt)
        on_device = None if g is None else g.to(device)
        codes, scales, meaning = expected_rows(x, fmt, g)
        values, scale = quantize(x.to(device), fmt, global_scale=on_device)
        assert (unpack(values, width, fmt) == codes).all()
        if fmt is Q.FP8PerTensor:
            assert scale is None
        else:
            assert scale is not None
            stored = scale if fmt is Q.DeepSeekFp8 else scale.view(torch.uint8)
            assert (stored.cpu().numpy() == scales).all()
        got = dequantize(values, scale, fmt, width, torch.float32, global_scale=on_device).cpu()
        # The product of a value and a scale: exact but for DeepSeekFp8 and a global scale, which round once.
        assert torch.equal(got, torch.from_numpy(meaning.astype(np.float32)))
        assert torch.equal(got.signbit(), x.signbit())


def test_every_code_and_every_scale_is_read_right(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = torch.from_numpy(np.concatenate([E4M3_TABLE, [np.nan], -E4M3_TABLE, [np.nan]]))
    e2m1 = torch.from_numpy(np.concatenate([E2M1_TABLE, -E2M1_TABLE]))
    # Row e has scale byte e in each of its 8 blocks of 32, and every code.
    scale = codes.unsqueeze(1).expand(256, 8)
    power = 2.0 ** (codes.double() - 127)
    power[255] = torch.nan
    got = dequantize(codes.expand(256, 256).to(device), scale.to(device), Q.MXFP8, 256, torch.float32).cpu()
    largest = torch.finfo(torch.float32).max
    expected = (power.unsqueeze(1) * e4m3).clamp(-largest, largest).float()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    got = dequantize(codes.expand(256, 256).to(device), scale.repeat(1, 2).to(device), Q.MXFP4, 512, torch.float32)
    pairs = torch.stack([e2m1.repeat(16), e2m1.repeat_interleave(16)], 1).flatten()
    expected = (power.unsqueeze(1) * pairs).clamp(-largest, largest).float()
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    scale = codes.unsqueeze(1).expand(256, 32)
    g = torch.tensor(0.3)
    got = dequantize(codes.expand(256, 256).to(device), scale.to(device), Q.NVFP4, 512, torch.float32,
                     global_scale=g.to(device))  # fmt: skip
    expected = (e4m3.float() * g).unsqueeze(1) * pairs.float()
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


# --- The error table of the docstring ---------------------------------------------------------------------------------


def error_bounds(x: torch.Tensor, fmt: QuantFormat, g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In float64, ``[T, H]``: the column "error of x at most", and the column in terms of amax where there is one."""
    x = x.double()
    magnitude, width = x.abs(), x.shape[1]
    block = BLOCKS.get(fmt, width)
    padded = torch.nn.functional.pad(magnitude, (0, -width % block)).unflatten(1, (-1, block))
    amax = padded.amax(2, keepdim=True).expand_as(padded).flatten(1)[:, :width]
    g64 = torch.tensor(1.0, dtype=torch.float64) if g is None else g.double()
    match fmt:
        case Q.BF16:
            return magnitude / 256, None
        case Q.FP16:
            return (magnitude / 2048).clamp(min=2.0**-25), None
        case Q.FP8PerTensor:
            return (magnitude / 16).clamp(min=g64 / 1024), None
        case Q.DeepSeekFp8:
            return torch.maximum(magnitude / 16, amax / 448 / 1024), amax / 28
        case Q.MXFP8:
            s = 2.0 ** (amax.log2().floor() - 8)
            tight = torch.where(magnitude <= 464 * s, magnitude / 16, magnitude / 8)
            return torch.maximum(tight, s / 1024), amax / 8
        case Q.MXFP4:
            return torch.maximum(magnitude / 4, 2.0 ** (amax.log2().floor() - 2) / 4), amax / 4
        case Q.NVFP4:
            largest = (amax / 6 * 17 / 16).clamp(min=g64 / 64)
            holds = amax >= 6 * g64 / 64
            return torch.maximum(magnitude / 4, largest / 4), torch.where(holds, amax * 17 / 96, torch.inf)
    raise ValueError(fmt)


@pytest.mark.parametrize("data", ["normal", "uniform", "wide"])
@formats
def test_errors_stay_below_the_bounds(device: str, fmt: QuantFormat, data: str) -> None:
    x = make_rows(data, 200, 512)
    g = global_scale_for(x, fmt)
    on_device = None if g is None else g.to(device)
    values, scale = quantize(x.to(device), fmt, global_scale=on_device)
    got = dequantize(values, scale, fmt, 512, torch.float32, global_scale=on_device).cpu()
    error = (got.double() - x.double()).abs()
    arithmetic = x.double().abs() * 2.0**-21
    per_value, per_block = error_bounds(x, fmt, g)
    assert (error <= per_value + arithmetic).all()
    # The bounds are near: some value comes within a tenth of its own (relative errors reach 1/17 where 1/16 is said).
    assert (error > 0.9 * per_value).any() or data == "uniform" and fmt in (Q.MXFP8, Q.MXFP4)
    if per_block is not None:
        assert (error <= per_block + arithmetic).all()
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        rounded = dequantize(values, scale, fmt, 512, dtype, global_scale=on_device).cpu()
        kept = got.abs() < 65504  # of float16, where it saturates
        assert ((rounded.double() - got.double()).abs()[kept] <= got.double().abs()[kept] * unit + 2.0**-25).all()


def test_saturated_values_lose_what_the_docstring_says() -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = 511.99
    values, scale = quantize(x, Q.MXFP8)
    assert dequantize(values, scale, Q.MXFP8, 32, torch.float32)[0, 0] == 448
    x[0, 0] = 7.99
    values, scale = quantize(x, Q.MXFP4)
    assert dequantize(values, scale, Q.MXFP4, 32, torch.float32)[0, 0] == 6
    one, two = torch.ones(()), torch.full((), 2.0)
    for fmt, largest in ((Q.FP8PerTensor, 448), (Q.NVFP4, 2688)):
        for g in (one, two):
            values, scale = quantize(torch.full((1, 16), -1e30), fmt, global_scale=g)
            got = dequantize(values, scale, fmt, 16, torch.float32, global_scale=g)
            assert (got == -largest * g).all()


# --- Special values ---------------------------------------------------------------------------------------------------

LARGEST = torch.finfo(torch.float32).max
LEAST_SCALE = {Q.DeepSeekFp8: 2.0**-126, Q.MXFP8: 0, Q.MXFP4: 0, Q.NVFP4: 2.0**-6}  # MX: the byte


@formats
def test_zeros_stay_zeros(device: str, fmt: QuantFormat) -> None:
    x = torch.zeros(3, 40, device=device)
    x[1] = -0.0
    g = torch.ones((), device=device) if fmt is Q.FP8PerTensor else None
    values, scale = quantize(x, fmt, global_scale=g)
    got = dequantize(values, scale, fmt, 40, torch.float32, global_scale=g)
    assert (got == 0).all() and torch.equal(got.signbit(), x.signbit())
    if scale is not None:
        assert (scale.float() == LEAST_SCALE[fmt]).all()


@formats
@pytest.mark.parametrize("magnitude", [1e-45, 1e-41, 1.2e-38, 1e-30, 1e30, LARGEST])
def test_finite_rows_stay_finite(device: str, fmt: QuantFormat, magnitude: float) -> None:
    x = torch.full((2, 40), magnitude)
    x[1, ::3] = -magnitude / 3
    for g in [None] if fmt not in (Q.FP8PerTensor, Q.NVFP4) else [
        global_scale_of(x, fmt), torch.ones(()), torch.tensor(1e-45), torch.tensor(LARGEST)
    ]:  # fmt: skip
        g = None if g is None else g.to(device)
        values, scale = quantize(x.to(device), fmt, global_scale=g)
        for dtype in INPUTS:
            got = dequantize(values, scale, fmt, 40, dtype, global_scale=g).cpu()
            assert got.isfinite().all() and ((got == 0) | (got.signbit() == x.signbit())).all()
    if fmt in BLOCKS and fmt is not Q.NVFP4:  # down to subnormal rows, scales reach
        least = 2.0**-127 if fmt is not Q.DeepSeekFp8 else 2.0**-126
        got = dequantize(values, scale, fmt, 40, torch.float32).cpu().double()
        relative = 1 / 4 if fmt is Q.MXFP4 else 1 / 8
        allowed = torch.maximum(x.double().abs() * relative, torch.tensor(least / (4 if fmt is Q.MXFP4 else 1024)))
        assert ((got - x.double()).abs() <= allowed).all()


@pytest.mark.parametrize("what", [math.inf, -math.inf, math.nan])
@formats
def test_what_is_not_finite_spoils_its_block_alone(device: str, fmt: QuantFormat, what: float) -> None:
    x = make_rows("normal", 3, 300)
    g = global_scale_for(x, fmt)
    clean = x.clone()
    x[1, 200] = what
    g = None if g is None else g.to(device)

    def there_and_back(rows: torch.Tensor) -> torch.Tensor:
        values, scale = quantize(rows.to(device), fmt, global_scale=g)
        return dequantize(values, scale, fmt, 300, torch.float32, global_scale=g).cpu()

    got, expected = there_and_back(x), there_and_back(clean)
    block = BLOCKS.get(fmt, 1)
    first = 200 // block * block
    if fmt in (Q.BF16, Q.FP16):
        torch.testing.assert_close(got[1, 200], torch.tensor(what), rtol=0, atol=0, equal_nan=True)
    else:
        assert got[1, first : first + block].isnan().all()
    got[1, first : first + block] = expected[1, first : first + block]
    assert torch.equal(got, expected)


# --- Shapes, sizes and errors -----------------------------------------------------------------------------------------


@formats
def test_sizes_are_those_of_row_bytes(fmt: QuantFormat) -> None:
    g = torch.ones(()) if fmt is Q.FP8PerTensor else None
    for width in [*range(0, 35), 127, 128, 129, 7168]:
        values, scale = quantize(torch.ones(1, width), fmt, global_scale=g)
        assert (values.nbytes, 0 if scale is None else scale.nbytes) == row_bytes(fmt, width)
        assert dequantize(values, scale, fmt, width, torch.float32, global_scale=g).shape == (1, width)


@formats
def test_a_row_does_not_depend_on_others_nor_on_strides(device: str, fmt: QuantFormat) -> None:
    x = make_rows("wide", 12, 70).to(device)
    g = global_scale_for(x, fmt)
    values, scale = quantize(x, fmt, global_scale=g)
    parts = [part for part in (values, scale) if part is not None]
    for rows, start, end in ((x[:0], 0, 0), (x[3:4], 3, 4), (x.t().contiguous().t(), 0, 12)):
        same = [part for part in quantize(rows, fmt, global_scale=g) if part is not None]
        assert all(same_bits(part, whole[start:end]) for part, whole in zip(same, parts, strict=True))
    folded = quantize(x.unflatten(0, (3, 4)), fmt, global_scale=g)
    assert same_bits(folded[0], values.unflatten(0, (3, 4)))
    back = dequantize(*folded, fmt, 70, torch.bfloat16, global_scale=g)
    assert torch.equal(back.flatten(0, 1), dequantize(values, scale, fmt, 70, torch.bfloat16, global_scale=g))


def test_results_do_not_require_grad() -> None:
    values, scale = quantize(torch.ones(2, 32, requires_grad=True), Q.MXFP8)
    assert scale is not None and not values.requires_grad and not scale.requires_grad


ONE = torch.ones(())
X = torch.ones(2, 64)
MX = quantize(X, Q.MXFP8)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: quantize(X, Q.INT4), ValueError, "quant_format: activations cannot be dispatched as QuantFormat.INT4"),
        (lambda: quantize(X.double(), Q.MXFP8), TypeError, "hidden_states: expected bfloat16, .*got torch.float64"),
        (lambda: quantize(ONE, Q.MXFP8), ValueError, "hidden_states: expected at least 1 dimension"),
        (lambda: quantize(X, Q.FP8PerTensor), ValueError, "global_scale: FP8PerTensor needs one"),
        (lambda: quantize(X, Q.MXFP8, global_scale=ONE), ValueError, "global_scale: MXFP8 has none"),
        (lambda: quantize(X, Q.NVFP4, global_scale=X), ValueError, "global_scale: expected 1 element, got .*2, 64"),
        (lambda: quantize(X, Q.NVFP4, global_scale=ONE.half()), TypeError, "global_scale: expected float32, got .*16"),
        (lambda: global_scale_of(X, Q.MXFP8), ValueError, "quant_format: MXFP8 has no global scale"),
        (lambda: dequantize(*MX, Q.MXFP8, 64, torch.int8), TypeError, "dtype: expected bfloat16, .*got torch.int8"),
        (lambda: dequantize(*MX, Q.MXFP8, 65, torch.float32), ValueError, r"values: expected \[\*, 65\] for MXFP8"),
        (lambda: dequantize(X, MX[1], Q.MXFP8, 64, torch.float32), TypeError, "values: expected torch.float8_e4m3fn"),
        (lambda: dequantize(MX[0], None, Q.MXFP8, 64, torch.float32), ValueError, "scale: expected .*, 2. of .*None"),
        (lambda: dequantize(MX[0], X[:, :2], Q.MXFP8, 64, torch.float32), TypeError, "scale: expected torch.uint8 for"),
        (lambda: dequantize(MX[0], MX[1][:, :1], Q.MXFP8, 64, torch.float32), ValueError, r"scale: expected \[\*, 2\]"),
        (lambda: dequantize(MX[0], MX[1][:1], Q.MXFP8, 64, torch.float32), ValueError, r"one row per row.*2,.*1,"),
        (lambda: dequantize(MX[0], MX[1], Q.FP8PerTensor, 64, torch.float32, global_scale=ONE), ValueError,
         "scale: expected None for FP8PerTensor"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_global_scale(device: str) -> None:
    x = torch.tensor([[1.0, -896.0], [3.0, 4.0]], device=device)
    assert global_scale_of(x, Q.FP8PerTensor).item() == 2 and global_scale_of(x * 3, Q.NVFP4).item() == 1
    assert global_scale_of(x[:0], Q.NVFP4).item() == global_scale_of(0 * x, Q.NVFP4).item() == 2.0**-120


def test_scales_may_come_as_what_matrix_products_take() -> None:
    values, scale = quantize(make_rows("normal", 2, 64), Q.MXFP4)
    assert scale is not None
    as_e8m0 = dequantize(values, scale.view(torch.float8_e8m0fnu), Q.MXFP4, 64, torch.float32)
    assert torch.equal(as_e8m0, dequantize(values, scale, Q.MXFP4, 64, torch.float32))


# --- Compiled ---------------------------------------------------------------------------------------------------------


@formats
def test_compiled_gives_the_same_bits(device: str, fmt: QuantFormat) -> None:
    """Of one graph for T of 0, 1 and more, by Inductor on CPU; on a GPU its divisions may round otherwise."""
    torch._dynamo.reset()
    counters.clear()

    def there_and_back(
        x: torch.Tensor, g: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        values, scale = quantize(x, fmt, global_scale=g)
        return values, scale, dequantize(values, scale, fmt, x.shape[1], x.dtype, global_scale=g)

    backend = "inductor" if device == "cpu" else "aot_eager"
    run = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend=backend)
    for count in (6, 3, 1, 0):
        x = make_rows("wide", max(count, 1), 200, torch.bfloat16)[:count].to(device)
        x[1:2, 3], x[2:3, 150] = math.nan, math.inf
        g = torch.full((), 0.25, device=device) if fmt in (Q.FP8PerTensor, Q.NVFP4) else None
        (values, scale, back), (values_, scale_, back_) = run(x, g), there_and_back(x, g)
        torch.testing.assert_close(back, back_, rtol=0, atol=0, equal_nan=True)
        assert (scale is None) == (scale_ is None)
        if scale is not None:
            torch.testing.assert_close(scale.float(), scale_.float(), rtol=0, atol=0, equal_nan=True)
        sound = torch.ones_like(x, dtype=torch.bool)  # bytes of values in a spoilt block are unspecified
        sound[1:2, :128] = sound[2:3, 128:] = False
        if values.dtype == torch.uint8:
            sound = sound[:, ::2]
        assert torch.equal(values.float()[sound], values_.float()[sound])
    assert counters["stats"]["unique_graphs"] <= 3  # several tokens, 1, 0


@pytest.mark.parametrize("fmt", [Q.FP8PerTensor, *BLOCKS], ids=lambda fmt: fmt.name)
def test_inductor_fuses_a_norm_and_its_quantization(fmt: QuantFormat) -> None:
    """On CPU: one C++ function, and of FP8 no tensor of the rows' size but the values themselves."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    norm = torch.nn.RMSNorm(512, dtype=torch.bfloat16)

    def normalise_and_quantize(x: torch.Tensor, g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return quantize(norm(x), fmt, global_scale=g)

    g = torch.tensor(0.01) if fmt in (Q.FP8PerTensor, Q.NVFP4) else None
    x = make_rows("normal", 7, 512, torch.bfloat16)
    run = torch.compile(normalise_and_quantize, fullgraph=True, dynamic=True)
    (values, scale), (code,) = run_and_get_code(run, x, g)
    got = dequantize(values, scale, fmt, 512, torch.float32, global_scale=g)
    exact = torch.nn.functional.rms_norm(x.double(), (512,), norm.weight.double())
    assert (got.double() - exact).norm() / exact.norm() < (0.04 if fmt in E4M3 else 0.15)
    assert code.count("async_compile.cpp_pybinding(") == 1 and "extern_kernels." not in code
    widths = [math.prod(int(n) for n in re.findall(r"\b\d+\b", size))  # per row
              for size in re.findall(r"= empty_strided_cpu\((\(.*?\)),", code)]  # fmt: skip
    assert values.shape[1] in widths
    if fmt in E4M3:
        assert sum(width >= values.shape[1] for width in widths) == 1, widths


# --- torchao ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mx_tensor() -> ModuleType:
    return pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")


def torchao_rows(data: str, dtype: torch.dtype) -> torch.Tensor:
    x = make_rows(data, 64, 512, dtype)
    x[0] = 0
    x[1, 40:90] = -0.0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("fmt", [Q.MXFP8, Q.MXFP4], ids=lambda fmt: fmt.name)
def test_mx_bits_are_those_of_torchao(mx_tensor: ModuleType, fmt: QuantFormat, data: str, dtype: torch.dtype) -> None:
    element = {Q.MXFP8: torch.float8_e4m3fn, Q.MXFP4: torch.float4_e2m1fn_x2}[fmt]
    x = torchao_rows(data, dtype)
    x[2] *= 1e30
    x[3] *= 1e-30
    their_scale, theirs = mx_tensor.to_mx(x, element, 32)
    values, scale = quantize(x, fmt)
    assert torch.equal(values.view(torch.uint8), theirs.view(torch.uint8))
    assert scale is not None and torch.equal(scale, their_scale.view(torch.uint8))
    back = mx_tensor.MXTensor.to_mx(x, element, 32).dequantize(torch.float32)
    assert torch.equal(dequantize(values, scale, fmt, 512, torch.float32), back)


@pytest.mark.parametrize("fmt", [Q.MXFP8, Q.MXFP4], ids=lambda fmt: fmt.name)
def test_mx_of_the_least_scale_is_right_where_torchao_is_not(mx_tensor: ModuleType, fmt: QuantFormat) -> None:
    """Where the exponent is clamped to 2^-127, torchao 0.18 divides by 2^-126 but stores 2^-127."""
    element = {Q.MXFP8: torch.float8_e4m3fn, Q.MXFP4: torch.float4_e2m1fn_x2}[fmt]
    x = torch.full((1, 32), 2.0**-126)
    values, scale = quantize(x, fmt)
    assert torch.equal(dequantize(values, scale, fmt, 32, torch.float32), x)
    their_scale, theirs = mx_tensor.to_mx(x, element, 32)
    assert scale is not None and torch.equal(scale, their_scale.view(torch.uint8)) and scale[0, 0] == 0
    assert torch.equal(dequantize(theirs, scale, fmt, 32, torch.float32), x / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("with_global_scale", [False, True])
def test_nvfp4_bits_are_those_of_torchao(with_global_scale: bool, data: str, dtype: torch.dtype) -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = torchao_rows(data, dtype)
    g = None
    if with_global_scale:
        g = global_scale_of(x, Q.NVFP4)
        assert torch.equal(g, nvfp4.per_tensor_amax_to_scale(x.abs().amax()))
    their_scale, theirs = nvfp4.nvfp4_quantize(x, 16, g)
    values, scale = quantize(x, Q.NVFP4, global_scale=g)
    assert torch.equal(values, theirs)
    assert scale is not None and torch.equal(scale.view(torch.uint8), their_scale.view(torch.uint8).view(64, 32))
    back = nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=g).dequantize(torch.float32)
    assert torch.equal(dequantize(values, scale, Q.NVFP4, 512, torch.float32, global_scale=g), back)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("fmt, block", [(Q.DeepSeekFp8, 128), (Q.FP8PerTensor, 512)], ids=["DeepSeekFp8", "PerTensor"])
def test_float8_bits_are_those_of_torchao(fmt: QuantFormat, block: int, data: str) -> None:
    """Of float32 rows: from others torchao computes the scale in the dtype of the rows."""
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    x = make_rows(data, 64, 512)
    their_scale = primitives._choose_scale_float8(x, [64 if fmt is Q.FP8PerTensor else 1, block])
    theirs = primitives._quantize_affine_float8(x, their_scale)
    g = global_scale_for(x, fmt)
    values, scale = quantize(x, fmt, global_scale=g)
    assert torch.equal(values.view(torch.uint8), theirs.view(torch.uint8))
    used = g if scale is None else scale
    assert used is not None and torch.equal(used.flatten(), their_scale.flatten())
    back = primitives._dequantize_affine_float8(theirs, their_scale)
    assert torch.equal(dequantize(values, scale, fmt, 512, torch.float32, global_scale=g), back)


# --- Around a dispatch ------------------------------------------------------------------------------------------------

E, K, C, H = 8, 2, 6, 200  # H: the last block is short in every format
TOKENS = [5, 0, 1, 3]


def tokens_of(rank: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, each expert of a token alike, so that a token has one target rank."""
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS[rank], H, generator=g) * 10.0 ** torch.randint(-3, 4, (TOKENS[rank], 1), generator=g)
    ids = torch.randint(E, (TOKENS[rank], 1), generator=g).expand(-1, K)
    return x.bfloat16().to(device), ids.to(device)


def dispatch_quantized(rank: Rank, name: str, compiled: bool) -> int:
    """Compares every received row, and every combined token, with the sender's; returns how many rows came."""
    fmt, w = QuantFormat[name], rank.world_size
    torch._dynamo.reset()
    params = MoEEpCommParams(E, K, C, H, dispatch_format=fmt)
    group = create_communication(BootstrapConfig(w, rank.rank), params, backend_config(rank.device, timeout_sec=60))
    x, ids = tokens_of(rank.rank, rank.device)
    g = None
    if fmt in (Q.FP8PerTensor, Q.NVFP4):
        g = global_scale_of(x, fmt).cpu()
        dist.all_reduce(g, dist.ReduceOp.MAX)
        g = g.to(rank.device)

    def step(x: torch.Tensor, ids: torch.Tensor, g: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        values, scale = quantize(x, fmt, global_scale=g)
        got = torch_moe_ep.dispatch(group, values, ids, hidden_states_scale=scale)
        rows = dequantize(got.hidden_states, got.hidden_states_scale, fmt, H, torch.bfloat16, global_scale=g)
        return rows, got.topk_ids, torch_moe_ep.combine(group, rows, got.routing, num_tokens=x.shape[0])

    try:
        run = torch.compile(step, fullgraph=True, dynamic=True) if compiled else step
        rows, received_ids, out = run(x, ids, g)
    finally:
        group.destroy()
    count = 0
    for source in range(w):
        theirs, their_ids = tokens_of(source, rank.device)
        values, scale = quantize(theirs, fmt, global_scale=g)
        expected = dequantize(values, scale, fmt, H, torch.bfloat16, global_scale=g)
        if source == rank.rank:
            assert torch.equal(out, expected), (out, expected, (out != expected).nonzero())
        for t in range(len(theirs)):
            row = source * C + t
            if their_ids[t, 0].item() in group.local_experts:
                assert torch.equal(rows[row], expected[t])
                count += 1
            else:
                assert received_ids[row].eq(-1).all()
    return count


@pytest.mark.parametrize("world_size", [1, 2, 4])
@formats
def test_the_receiver_reads_what_the_sender_would(
    ranks: Callable[[int], RankPool], fmt: QuantFormat, world_size: int
) -> None:
    received = ranks(world_size).run(dispatch_quantized, fmt.name, False)
    assert sum(received) == sum(TOKENS[:world_size])


@pytest.mark.parametrize("fmt", [Q.DeepSeekFp8, Q.NVFP4], ids=lambda fmt: fmt.name)
def test_the_same_in_one_compiled_graph(ranks: Callable[[int], RankPool], fmt: QuantFormat) -> None:
    received = ranks(2).run(dispatch_quantized, fmt.name, True, timeout=PATIENCE)
    assert sum(received) == sum(TOKENS[:2])
