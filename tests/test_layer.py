"""MoEEpLayer against loops over tokens in one process; the expert-major order against a sort in Python."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import backend_config
from conftest import DEVICES
from ranks import Rank, RankPool
from tiny_model import PATIENCE
from torch import nn
from torch._dynamo.utils import counters
from torch.export import Dim

import torch_moe_ep
from torch_moe_ep import (
    BootstrapConfig,
    GroupedSwiGLU,
    GroupedSwiGLUConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpLayer,
    MoEEpTensors,
    MoEWeightPack,
    QuantFormat,
    SplitConfig,
    dequantize,
    expert_major,
    quantize,
    sum_slots,
    take_rows,
)
from torch_moe_ep.experts import grouped_mm, quantize_rows

H, F, C = 16, 24, 12


@contextmanager
def nan_in_fresh_tensors() -> Iterator[None]:
    """New tensors are filled with NaN, so that whoever reads an unspecified row shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# --- Cases and the reference -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    num_experts: int = 6
    top_k: int = 2
    tokens: tuple[int, ...] = (5, 3, 8, 1)  # T of rank r
    routing: str = "distinct"
    tokens_per_rank: int | None = None


CASES = {
    "plain": Case(),
    "small_step": Case(tokens_per_rank=9),
    "uneven_experts": Case(num_experts=7, top_k=3),
    "fewer_experts_than_ranks": Case(num_experts=3, top_k=2),
    "one_expert": Case(num_experts=1, top_k=1),
    "top_1": Case(top_k=1),
    "top_22": Case(num_experts=24, top_k=22, tokens=(3, 2, 0, 1)),
    "one_token": Case(tokens=(1, 0, 0, 0)),
    "no_tokens": Case(tokens=(0, 0, 0, 0)),
    "nowhere": Case(routing="nowhere"),
    "dirty": Case(num_experts=7, top_k=4, routing="dirty"),
    "all_to_the_last_expert": Case(routing="last_expert"),
    "repeated": Case(num_experts=4, top_k=4, routing="repeated"),
}


def inputs_of(case: Case, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden states, ids and weights of a rank."""
    g = torch.Generator().manual_seed(rank)
    t, k, e = case.tokens[rank], case.top_k, case.num_experts
    x, weights = torch.randn(t, H, generator=g, dtype=torch.float64), torch.rand(t, k, generator=g, dtype=torch.float64)
    match case.routing:
        case "distinct":
            ids = torch.rand(t, e, generator=g).topk(k).indices
        case "nowhere":
            ids = torch.full((t, k), -1)
        case "last_expert":
            ids = torch.tensor([e - 1, -1]).expand(t, k)
        case "repeated":
            ids = torch.randint(2, (t, k), generator=g) * (e - 1)
        case _:
            ids = torch.randint(-2, e + 3, (t, k), generator=g)
    return x.to(dtype), ids, weights.to(dtype)


def full_weights(num_experts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``[E, 2*F, H]`` and ``[E, H, F]``, the same on every rank."""
    g = torch.Generator().manual_seed(99)
    w13 = torch.randn(num_experts, 2 * F, H, generator=g, dtype=torch.float64) / H**0.5
    w2 = torch.randn(num_experts, H, F, generator=g, dtype=torch.float64) / F**0.5
    return w13.to(dtype), w2.to(dtype)


def by_token(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor,
    gate_first: bool = False,
) -> torch.Tensor:
    """The layer, one token and one expert at a time."""
    out = []
    for token, names, shares in zip(x, ids.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for name, share in zip(names, shares, strict=True):
            if 0 <= name < len(w13):
                halves = (w13[name] @ token).split(len(w13[name]) // 2)
                gate, up = halves if gate_first else halves[::-1]
                total = total + share * (w2[name] @ (gate / (1 + (-gate).exp()) * up))
        out.append(total)
    nothing = 0 * (x.sum() + weights.sum() + w13.sum() + w2.sum())  # so that what no token uses has a gradient of zeros
    return (torch.stack(out) if out else x) + nothing


Gradients = dict[str, torch.Tensor]


def differentiate(
    run: Callable[..., torch.Tensor], x: torch.Tensor, weights: torch.Tensor, parameters: dict[str, torch.Tensor]
) -> Gradients:
    """The result of ``run(x, weights)`` and the gradients of its square sum."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    for parameter in parameters.values():
        parameter.grad = None
    y = run(x, weights)
    y.square().sum().backward()
    got = {"y": y, "x": x.grad, "weights": weights.grad} | {name: p.grad for name, p in parameters.items()}
    assert all(tensor is not None for tensor in got.values()), [name for name in got if got[name] is None]
    return {name: tensor.detach().cpu() for name, tensor in got.items()}


def expected_of(
    case: Case, world_size: int, rank: int, dtype: torch.dtype, hidden_states: Sequence[torch.Tensor] | None = None
) -> Gradients:
    """What belongs to this rank of the results of one process that has the tokens of all ranks and all experts: of
    inputs rounded to ``dtype``, computed in float64. With ``hidden_states``, those are the tokens of the ranks."""
    parts = [inputs_of(case, r, dtype) for r in range(world_size)]
    x, ids, weights = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    x, weights = (x if hidden_states is None else torch.cat(list(hidden_states))).double(), weights.double()
    w13, w2 = (w.double().requires_grad_() for w in full_weights(case.num_experts, dtype))
    whole = differentiate(lambda x, weights: by_token(x, ids, weights, w13, w2), x, weights, {"w13": w13, "w2": w2})
    first = sum(case.tokens[:rank])
    local = MoEEpCommParams(case.num_experts, case.top_k, C, H).local_experts(rank, world_size)
    return {
        name: tensor[local.start : local.stop] if name in ("w13", "w2") else tensor[first : first + case.tokens[rank]]
        for name, tensor in whole.items()
    }


def params_of(case: Case, dtype: torch.dtype) -> MoEEpCommParams:
    return MoEEpCommParams(case.num_experts, case.top_k, C, H, dtype=dtype)


def make_layer(case: Case, rank: Rank, dtype: torch.dtype, **options: Any) -> MoEEpLayer:
    """The layer with this rank's share of :func:`full_weights`."""
    params = options.pop("params", None) or params_of(case, dtype)
    local = params.local_experts(rank.rank, rank.world_size)
    w13, w2 = (nn.Parameter(w[local.start : local.stop].to(rank.device)) for w in full_weights(case.num_experts, dtype))
    bootstrap = BootstrapConfig(rank.world_size, rank.rank, device=rank.device.index)
    return MoEEpLayer(bootstrap, params, MoEWeightPack(w13, w2), **options)


def run_layer(layer: nn.Module, case: Case, rank: Rank, dtype: torch.dtype, kernel: nn.Module) -> Gradients:
    x, ids, weights = (tensor.to(rank.device) for tensor in inputs_of(case, rank.rank, dtype))
    return differentiate(
        lambda x, weights: layer(MoEEpTensors(x, ids, weights, runtime_max_tokens_per_rank=case.tokens_per_rank)),
        x, weights, dict(kernel.named_parameters()),
    )


def assert_close(got: Gradients, expected: Gradients, what: str, **tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(
            tensor.double(), expected[name].double(), msg=lambda m, n=name: f"{what}, {n}: {m}", **tolerance
        )


def alone(device: str = "cpu") -> Rank:
    return Rank(0, 1, torch.device(device))


# --- Results and gradients --------------------------------------------------------------------------------------------


def compare_all_cases(rank: Rank) -> None:
    with nan_in_fresh_tensors():
        for name, case in CASES.items():
            layer = make_layer(case, rank, torch.float64)
            got = run_layer(layer, case, rank, torch.float64, layer.kernel)
            again = run_layer(layer, case, rank, torch.float64, layer.kernel)
            layer.destroy()
            what = f"{name}, W={rank.world_size}, rank {rank.rank}"
            assert_close(got, expected_of(case, rank.world_size, rank.rank, torch.float64), what, rtol=1e-9, atol=1e-11)
            assert_close(again, got, f"again: {what}", rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_and_gradients_are_those_of_one_process(ranks: Callable[[int], RankPool], world_size: int) -> None:
    ranks(world_size).run(compare_all_cases, timeout=PATIENCE)


def compare_bfloat16(rank: Rank) -> None:
    """On CUDA through torch's grouped kernel, on CPU through the loop: the reference computes in float64 on the same
    rounded numbers."""
    for name in ("plain", "dirty", "top_22"):
        case = CASES[name]
        layer = make_layer(case, rank, torch.bfloat16)
        with nan_in_fresh_tensors():
            got = run_layer(layer, case, rank, torch.bfloat16, layer.kernel)
        layer.destroy()
        expected = expected_of(case, rank.world_size, rank.rank, torch.bfloat16)
        for key, tensor in got.items():
            scale = expected[key].abs().max().item() if expected[key].numel() else 0
            error = (tensor.double() - expected[key]).abs().max().item() if tensor.numel() else 0
            assert error <= 0.04 * scale, f"{name}, {key}: {error} of {scale}"


def test_bfloat16(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(compare_bfloat16, timeout=PATIENCE)


def check_identity(rank: Rank) -> None:
    case = CASES["dirty"]
    x, ids, weights = (tensor.to(rank.device) for tensor in inputs_of(case, rank.rank, torch.float32))
    layer = MoEEpLayer(
        BootstrapConfig(rank.world_size, rank.rank), params_of(case, torch.float32),
        backend=SplitConfig(kernel="identity"), device=rank.device,
    )
    with nan_in_fresh_tensors():
        y = layer(MoEEpTensors(x, ids, weights))
    layer.destroy()
    valid = (ids >= 0) & (ids < case.num_experts)
    torch.testing.assert_close(y, x * (weights * valid).sum(1, keepdim=True))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_identity(ranks: Callable[[int], RankPool], world_size: int) -> None:
    ranks(world_size).run(check_identity, timeout=PATIENCE)


def test_gate_first(device: str) -> None:
    case, rank = CASES["plain"], alone(device)
    layer = make_layer(case, rank, torch.float64, backend=SplitConfig(kernel=GroupedSwiGLUConfig(gate_first=True)))
    x, ids, weights = inputs_of(case, 0, torch.float64)
    y = layer(MoEEpTensors(x.to(device), ids.to(device), weights.to(device)))
    layer.destroy()
    expected = by_token(x, ids, weights, *full_weights(case.num_experts, torch.float64), gate_first=True)
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-9, atol=1e-11)


# --- Kernels of one's own ---------------------------------------------------------------------------------------------


class OneLinear(nn.Module):
    """Every expert is the same matrix, applied to every row without a look at its ids."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, H * H, device=device).reshape(H, H))

    def forward(self, rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return rows @ self.matrix * weights.sum(1, keepdim=True)


def test_a_module_as_kernel_never_sees_what_lies_in_empty_rows(device: str) -> None:
    case, kernel = CASES["plain"], OneLinear(device)
    layer = MoEEpLayer(BootstrapConfig(1, 0), params_of(case, torch.float32), backend=SplitConfig(kernel=kernel))
    with nan_in_fresh_tensors():
        got = run_layer(layer, case, alone(device), torch.float32, kernel)
    x, _, weights = inputs_of(case, 0, torch.float32)
    matrix = kernel.matrix.detach().cpu().requires_grad_()
    expected = differentiate(lambda x, w: x @ matrix * w.sum(1, keepdim=True), x, weights, {"matrix": matrix})
    layer.destroy()
    assert_close(got, expected, "one matrix", rtol=1e-5, atol=1e-5)


def test_what_a_kernel_is_given(device: str) -> None:
    seen = []

    def kernel(rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        seen.append((rows, local_ids, weights))
        return rows

    params = MoEEpCommParams(6, 2, 4, H, dtype=torch.float32)
    layer = MoEEpLayer(BootstrapConfig(1, 0), params, backend=SplitConfig(kernel=kernel), device=device)
    ids = torch.tensor([[5, 0], [6, -1], [-1, 3]], device=device)
    x, weights = torch.ones(3, H, device=device), torch.full((3, 2), 0.5, device=device)
    with nan_in_fresh_tensors():
        y = layer(MoEEpTensors(x, ids, weights))
    layer.destroy()
    rows, local_ids, given = seen[0]
    assert local_ids.dtype == torch.int32 and local_ids.tolist() == [[5, 0], [-1, -1], [-1, 3], [-1, -1]]
    assert given.tolist() == [[0.5, 0.5], [0, 0], [0, 0.5], [0, 0]]
    assert rows.sum(1).tolist() == [H, 0, H, 0] and y.sum(1).tolist() == [H, 0, H]


class ThroughTheClass(MoEEpCommunication):
    """A backend that is none of ours: it has dispatch and combine alone, and says what it was asked."""

    backend_name = "through_the_class"

    @classmethod
    def is_platform_supported(cls) -> bool:
        return True

    def __init__(self, inner: MoEEpCommunication) -> None:
        super().__init__(inner.bootstrap, inner.params)
        self.inner, self.comm, self.order, self.asked = inner, inner.comm, inner.order, []

    def dispatch(self, *args: Any, **options: Any) -> torch_moe_ep.MoEEpDispatchResult:
        self.asked.append(options)
        return self.inner.dispatch(*args, **options)

    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner.combine(expert_output, output=output)


def test_any_backend_class(device: str) -> None:
    case, rank = CASES["small_step"], alone(device)
    inner = torch_moe_ep.create_communication(
        BootstrapConfig(1, 0), params_of(case, torch.float64), backend_config(device)
    )
    group = ThroughTheClass(inner)
    kernel = GroupedSwiGLU(*(nn.Parameter(w.to(device)) for w in full_weights(case.num_experts, torch.float64)))
    layer = MoEEpLayer(group=group, backend=SplitConfig(kernel=kernel))
    got = run_layer(layer, case, rank, torch.float64, kernel)
    inner.destroy()
    assert group.asked[0]["runtime_max_tokens_per_rank"] == 9
    assert_close(got, expected_of(case, 1, 0, torch.float64), "class", rtol=1e-9, atol=1e-11)


def same_bits_over_collectives(rank: Rank) -> None:
    case, results = CASES["dirty"], []
    for comm in (None, "torch_distributed"):
        for quant_format in (None, QuantFormat.MXFP8):
            layer = make_layer(
                case, rank, torch.float32, backend=SplitConfig(comm=comm),
                params=replace(params_of(case, torch.float32), dispatch_format=quant_format),
            )
            assert (layer.group.backend_name == "torch_distributed") == (comm is not None)
            with nan_in_fresh_tensors():
                results.append(run_layer(layer, case, rank, torch.float32, layer.kernel))
            layer.destroy()
    assert_close(results[2], results[0], "over collectives", rtol=0, atol=0)
    assert_close(results[3], results[1], "over collectives, quantized", rtol=0, atol=0)


def test_the_same_bits_over_collectives(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(same_bits_over_collectives, timeout=PATIENCE)


# --- FP8 weights ------------------------------------------------------------------------------------------------------


def test_fp8_weights(device: str) -> None:
    """Against the loop over tokens with the same roundings: of weights, rows and inner activations."""
    case, dtype = CASES["dirty"], torch.bfloat16 if device == "cuda" else torch.float32
    w13, w2 = full_weights(case.num_experts, torch.float32)
    (q13, s13), (q2, s2) = (quantize_rows(w.flatten(0, 1)) for w in (w13, w2))
    pack = MoEWeightPack(*(t.to(device) for t in (q13.view_as(w13), q2.view_as(w2),
                                                  s13.view(w13.shape[:2]), s2.view(w2.shape[:2]))))
    layer = MoEEpLayer(BootstrapConfig(1, 0), params_of(case, dtype), pack)
    x, ids, weights = inputs_of(case, 0, dtype)
    tensors = MoEEpTensors(x.to(device), ids.to(device), weights.to(device))
    with torch.no_grad(), nan_in_fresh_tensors():
        y = layer(tensors).cpu().float()
    tensors.hidden_states.requires_grad_()
    with pytest.raises(RuntimeError, match="FP8 weights are for inference"):
        layer(tensors)
    layer.destroy()

    def rounded(t: torch.Tensor) -> torch.Tensor:
        values, scale = quantize_rows(t)
        return values.float() * scale.unsqueeze(1)

    back13 = (q13.float() * s13.unsqueeze(1)).view_as(w13)
    back2 = (q2.float() * s2.unsqueeze(1)).view_as(w2)
    expected = torch.zeros_like(y)
    for t, names in enumerate(ids.tolist()):
        for k, name in enumerate(names):
            if 0 <= name < case.num_experts:
                up, gate = (rounded(x[t : t + 1].float()) @ back13[name].t()).to(dtype).chunk(2, 1)
                inner = rounded((nn.functional.silu(gate) * up).float())
                expected[t] += weights[t, k].float() * (inner @ back2[name].t()).to(dtype).float()[0]
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2 if device == "cuda" else 2e-6)
    exact = by_token(x.float(), ids, weights.float(), w13, w2)
    assert 0 < (y - exact).abs().max() < 0.15 * exact.abs().max()


# --- Quantized dispatch -----------------------------------------------------------------------------------------------


def compare_formats(rank: Rank) -> None:
    """Tokens are rounded to the format and nothing else changes; gradients pass as if nothing had been rounded."""
    case, dtype = CASES["dirty"], torch.float32
    for name in FORMATS:
        quant_format = QuantFormat[name]
        scale = torch.tensor(0.0078125) if name in ("FP8PerTensor", "NVFP4") else None
        parts = [inputs_of(case, r, dtype) for r in range(rank.world_size)]
        rounded = [
            dequantize(*quantize(x, quant_format, global_scale=scale), quant_format, H, dtype, global_scale=scale)
            for x, _, _ in parts
        ]
        assert not torch.equal(rounded[rank.rank], parts[rank.rank][0])
        layer = make_layer(
            case, rank, dtype, params=replace(params_of(case, dtype), dispatch_format=quant_format),
            global_scale=None if scale is None else scale.to(rank.device),
        )
        with nan_in_fresh_tensors():
            got = run_layer(layer, case, rank, dtype, layer.kernel)
        expected = expected_of(case, rank.world_size, rank.rank, dtype, rounded)
        assert_close(got, expected, name, rtol=1e-4, atol=1e-4)
        x, ids, weights = (t.to(rank.device) for t in parts[rank.rank])
        if name not in ("BF16", "FP16"):
            values, factors = quantize(x, quant_format, global_scale=layer.global_scale)
            with torch.no_grad():
                assert torch.equal(layer(MoEEpTensors(values, ids, weights, factors)).cpu(), got["y"].float()), name
        layer.destroy()


FORMATS = [f.name for f in QuantFormat if f.name not in ("INT4", "MXINT4")]


@pytest.mark.parametrize("world_size", [1, 2])
def test_quantized_dispatch(ranks: Callable[[int], RankPool], world_size: int) -> None:
    ranks(world_size).run(compare_formats, timeout=PATIENCE)


@pytest.mark.parametrize("name", ["DeepSeekFp8", "NVFP4"])
def test_quantized_dispatch_compiles(device: str, name: str) -> None:
    case, rank = CASES["plain"], alone(device)
    params = replace(params_of(case, torch.float32), dispatch_format=QuantFormat[name])
    layer = make_layer(case, rank, torch.float32, params=params)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with nan_in_fresh_tensors():
        got = run_layer(compiled, case, rank, torch.float32, layer.kernel)
    assert_close(got, run_layer(layer, case, rank, torch.float32, layer.kernel), name, rtol=1e-4, atol=1e-4)
    layer.destroy()


def test_quantized_tensors_that_do_not_fit(device: str) -> None:
    params = replace(params_of(Case(), torch.float32), dispatch_format=QuantFormat.MXFP8)
    layer = make_layer(Case(), alone(device), torch.float32, params=params)
    x, ids, weights = (t.to(device) for t in inputs_of(Case(), 0, torch.float32))
    values, factors = quantize(x, QuantFormat.MXFP8)
    assert factors is not None
    for tensors, text in (
        (MoEEpTensors(values[:, :8], ids, weights, factors), "hidden_states: expected rows of 16 bytes for MXFP8"),
        (MoEEpTensors(values, ids, weights), "hidden_states_scale: expected rows of 1 bytes for MXFP8"),
        (MoEEpTensors(values, ids, weights, factors.float()), "hidden_states_scale: expected rows of 1 bytes"),
        (MoEEpTensors(x.double(), ids, weights), "hidden_states: expected torch.float32"),
    ):
        with pytest.raises(ValueError, match=text):
            layer(tensors)
    layer.destroy()
    for quant_format, scale, text in (("FP8PerTensor", None, "global_scale: expected a float32"),
                                      ("MXFP8", torch.ones(()), "global_scale: expected None")):
        with pytest.raises(ValueError, match=text):
            make_layer(Case(), alone(device), torch.float32, global_scale=scale,
                       params=replace(params, dispatch_format=QuantFormat[quant_format]))


# --- Compiled, exported, captured -------------------------------------------------------------------------------------


def compare_compiled(rank: Rank) -> int:
    """Results and gradients of several sizes against eager; returns the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    case = CASES["uneven_experts"]
    layer = make_layer(case, rank, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in ((5, 7), (2, 4), (8, 3), (11, 9)):  # a first T of K, or a T of C, is a size that PyTorch tells apart
        sized = Case(case.num_experts, case.top_k, tokens)
        eager = run_layer(layer, sized, rank, torch.float32, layer.kernel)
        with nan_in_fresh_tensors():
            got = run_layer(compiled, sized, rank, torch.float32, layer.kernel)
        assert_close(got, eager, f"compiled, T={tokens}", rtol=1e-4, atol=1e-4)
    layer.destroy()
    return counters["stats"]["unique_graphs"]


def test_one_graph_for_all_sizes(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(compare_compiled, timeout=PATIENCE) == [1, 1]


def test_no_tokens_and_one_token_compiled(device: str) -> None:
    layer = make_layer(CASES["plain"], alone(device), torch.float32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for count in (0, 1, 3):
        case = Case(tokens=(count,))
        got = run_layer(compiled, case, alone(device), torch.float32, layer.kernel)
        eager = run_layer(layer, case, alone(device), torch.float32, layer.kernel)
        assert_close(got, eager, f"T={count}", rtol=1e-4, atol=1e-4)
    layer.destroy()


def export_save_load_run(rank: Rank) -> None:
    case = CASES["uneven_experts"]
    layer = make_layer(case, rank, torch.float32)
    example = MoEEpTensors(*(t.to(rank.device) for t in inputs_of(case, 0, torch.float32)))
    tokens = Dim("tokens", max=C)
    exported = torch.export.export(
        layer, (example,), dynamic_shapes={"tensors": [{0: tokens}] * 3}, strict=False
    )
    assert set(exported.state_dict) == {"kernel.w13", "kernel.w2"}
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    with torch.no_grad():
        for count in (5, 9, C):
            x, ids, weights = inputs_of(Case(7, 3, (count, count)), rank.rank, torch.float32)
            tensors = MoEEpTensors(x.to(rank.device), ids.to(rank.device), weights.to(rank.device))
            torch.testing.assert_close(loaded(tensors), layer(tensors), rtol=0, atol=0)
    layer.destroy()


def test_export(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(export_save_load_run, timeout=PATIENCE)


@pytest.mark.skipif("cuda" not in DEVICES, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["grouped", "looped"])
def test_captured(dtype: torch.dtype) -> None:
    case, rank = Case(tokens=(8,)), alone("cuda")
    layer = make_layer(case, rank, dtype)
    tensors = MoEEpTensors(*(t.cuda() for t in inputs_of(case, 0, dtype)))
    with torch.no_grad():
        torch.cuda.set_sync_debug_mode("error")  # a layer that asks the GPU for a number raises
        try:
            layer(tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(tensors)
        for seed in range(3):
            g = torch.Generator().manual_seed(seed)
            tensors.topk_ids.copy_(torch.rand(8, case.num_experts, generator=g).topk(case.top_k).indices)
            tensors.hidden_states.copy_(torch.randn(8, H, generator=g))
            graph.replay()
            torch.testing.assert_close(y, layer(tensors), rtol=0, atol=0)
    layer.destroy()


# --- Communicators ----------------------------------------------------------------------------------------------------


def test_layers_share_a_communicator(device: str) -> None:
    case = CASES["plain"]
    first = make_layer(case, alone(device), torch.float32)
    rounds = first.group.describe()["rounds"]
    second = MoEEpLayer(group=first.group, weights=MoEWeightPack(first.kernel.w13, first.kernel.w2))
    assert second.order is first.order and second.comm == first.comm and second.params == first.params
    x, ids, weights = (t.to(device) for t in inputs_of(case, 0, torch.float32))
    second.destroy()  # not its own
    tensors = MoEEpTensors(x, ids, weights)
    assert torch.equal(first(tensors), second(tensors))
    assert first.group.describe()["rounds"] == rounds + 4
    first.destroy()
    first.destroy()
    with pytest.raises(ValueError, match=first.comm):
        second(tensors)


def test_copies_and_conversions_keep_the_order_of_the_communicator(device: str) -> None:
    layer = make_layer(CASES["plain"], alone(device), torch.float32)
    copies = [copy.deepcopy(layer) for _ in range(3)]
    for other in (copies[0], copies[1].to(torch.float64), copies[2].to_empty(device=device)):
        assert other.order is layer.order and other.group is layer.group
        assert other.first_expert.tolist() == [0]
        assert other.kernel.w13.data_ptr() != layer.kernel.w13.data_ptr()
    assert set(layer.state_dict()) == {"kernel.w13", "kernel.w2"}
    layer.destroy()


def test_weights_stay_the_parameters_they_are(device: str) -> None:
    w13, w2 = (w.to(device) for w in full_weights(6, torch.float32))
    parameter = nn.Parameter(w13)
    layer = MoEEpLayer(BootstrapConfig(1, 0), params_of(Case(), torch.float32), MoEWeightPack(parameter, w2))
    assert layer.kernel.w13 is parameter
    assert layer.kernel.w2.data_ptr() == w2.data_ptr() and not layer.kernel.w2.requires_grad
    layer.destroy()


def test_an_explicit_backend_is_obeyed_or_refused(device: str) -> None:
    weights = MoEWeightPack(*(w.to(device) for w in full_weights(6, torch.float32)))
    bootstrap, params = BootstrapConfig(1, 0), params_of(Case(), torch.float32)
    config = backend_config(device, timeout_sec=77)
    for backend in (config, SplitConfig(comm=config)):
        layer = MoEEpLayer(bootstrap, params, weights, backend)
        assert layer.timeout_sec == 77 and layer.group.backend_name == config.backend_name
        layer.destroy()
    with pytest.raises(KeyError, match="no_such_backend"):
        MoEEpLayer(bootstrap, params, weights, "no_such_backend")
    other = "shm_one_sided" if device == "cuda" else "nvlink_one_sided"
    kind, reason = (ValueError, "moves tensors on cpu") if device == "cuda" else (RuntimeError, "cannot run on this")
    if device == "cuda" or "cuda" not in DEVICES:
        with pytest.raises(kind, match=reason):
            MoEEpLayer(bootstrap, params, weights, SplitConfig(comm=other))
    layer = MoEEpLayer(bootstrap, params, weights)
    assert layer.group.backend_name == {"cpu": "shm_one_sided", "cuda": "nvlink_one_sided"}[device]
    with pytest.raises(ValueError, match=r"SplitConfig.comm: expected None or"):
        MoEEpLayer(weights=weights, backend=other, group=layer.group)
    layer.destroy()


W13, W2 = full_weights(6, torch.float32)
COMPUTED = W13.clone().requires_grad_() * 1


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"weights": None}, ValueError, "weights: expected a MoEWeightPack"),
        ({"bootstrap": None}, ValueError, "bootstrap, params: expected both, or a communicator"),
        ({"params": None}, ValueError, "bootstrap, params: expected both, or a communicator"),
        ({"weights": MoEWeightPack(W13[:5], W2[:5])}, ValueError, r"weights.w13: expected 6 local experts and hidden"),
        ({"weights": MoEWeightPack(W13[:, :, :8], W2[:, :8])}, ValueError, r"hidden size 16 in \[L, 2\*F, H\], got"),
        ({"weights": MoEWeightPack(W2, W13)}, ValueError, r"w13, w2: expected \[L, 2\*F, H\] and \[L, H, F\]"),
        ({"weights": MoEWeightPack(W13, W2, torch.ones(6, 2 * F))}, ValueError, "w13_scale, w2_scale: expected both"),
        ({"weights": MoEWeightPack(W13, W2, torch.ones(6, 2 * F), torch.ones(6, H))}, ValueError, "w13: expected"),
        ({"weights": MoEWeightPack(W13.to(torch.float8_e4m3fn), W2.to(torch.float8_e4m3fn), *torch.ones(2, 6))},
         ValueError, r"w13_scale: expected float32 of shape \(6, 48\)"),
        ({"weights": MoEWeightPack(COMPUTED, W2)}, ValueError, "w13: expected a leaf tensor or a Parameter"),
        ({"backend": SplitConfig(kernel="fused")}, ValueError, "weights: expected None, since the kernel 'fused'"),
        ({"backend": SplitConfig(kernel="fused"), "weights": None}, TypeError, "SplitConfig.kernel: expected"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    given = {"bootstrap": BootstrapConfig(1, 0), "params": params_of(Case(), torch.float32),
             "weights": MoEWeightPack(W13, W2)} | arguments
    with pytest.raises(kind, match=text):
        MoEEpLayer(**given)


def test_tensors_that_do_not_fit_leave_the_layer_usable(device: str) -> None:
    case = CASES["plain"]
    layer = make_layer(case, alone(device), torch.float32)
    x, ids, weights = (t.to(device) for t in inputs_of(case, 0, torch.float32))
    wrong: list[tuple[MoEEpTensors, type[Exception], str]] = [
        (MoEEpTensors(x, ids, None), TypeError, "topk_weights: expected a tensor"),  # type: ignore[arg-type]
        (MoEEpTensors(x[:, :8], ids, weights), ValueError, r"hidden_states: expected \[T, 16\]"),
        (MoEEpTensors(x.double(), ids, weights), ValueError, "hidden_states: expected torch.float32"),
        (MoEEpTensors(x, ids, weights, x[:, :1]), ValueError, "hidden_states_scale: expected None"),
        (MoEEpTensors(x, ids.float(), weights), TypeError, "topk_ids"),
        (MoEEpTensors(x, ids, weights, runtime_max_tokens_per_rank=3), ValueError, "tokens_per_rank"),
        (MoEEpTensors(x, ids, weights, runtime_max_tokens_per_rank=C + 1), ValueError, "tokens_per_rank"),
    ]
    for tensors, kind, text in wrong:
        with pytest.raises(kind, match=text):
            layer(tensors)
    got = run_layer(layer, case, alone(device), torch.float32, layer.kernel)
    assert_close(got, expected_of(case, 1, 0, torch.float32), "after errors", rtol=1e-4, atol=1e-4)
    layer.destroy()


# --- Expert-major order -----------------------------------------------------------------------------------------------


def random_ids(seed: int, rows: int, k: int, experts: int) -> torch.Tensor:
    """Half of them -1, with repetitions."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(experts, (rows, k), generator=g)
    return torch.where(torch.rand(rows, k, generator=g) < 0.5, -1, ids).int()


def sorted_pairs(ids: torch.Tensor) -> list[tuple[int, int]]:
    """(expert, row) in order."""
    return sorted({(name, row) for row, names in enumerate(ids.tolist()) for name in names if name >= 0})


SIZES = [(1, 1, 1), (7, 3, 4), (7, 5, 2), (40, 8, 16), (3, 32, 5), (64, 1, 9), (5, 2, 1)]


@pytest.mark.parametrize(("rows", "k", "experts"), SIZES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expert_major_sorts_pairs(device: str, rows: int, k: int, experts: int, dtype: torch.dtype) -> None:
    compiled = torch.compile(expert_major, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in range(5):
        ids = random_ids(seed, rows, k, experts)
        pairs = sorted_pairs(ids)
        for sort in (expert_major, compiled):
            got = sort(ids.to(device, dtype), experts)
            assert got.source_rows.shape == (rows * min(k, experts),) and got.positions.shape == (rows, k)
            assert got.source_rows.tolist()[: len(pairs)] == [row for _, row in pairs]
            assert not any(got.source_rows.tolist()[len(pairs) :])
            assert got.offsets.dtype == torch.int32
            assert got.offsets.tolist() == [sum(name <= e for name, _ in pairs) for e in range(experts)]
            slot = {pair: number for number, pair in enumerate(pairs)}
            assert got.positions.tolist() == [
                [slot.get((name, row), -1) for name in names] for row, names in enumerate(ids.tolist())
            ]


def test_the_example_of_expert_major(device: str) -> None:
    got = expert_major(torch.tensor([[1, 0], [-1, -1], [-1, 1]], device=device), 2)
    assert [t.tolist() for t in got] == [[0, 0, 2, 0, 0, 0], [1, 3], [[1, 0], [-1, -1], [-1, 2]]]


def test_expert_major_refuses(device: str) -> None:
    for ids, experts, text in (
        (torch.zeros(3, device=device), 2, "local_ids: expected an int32"),
        (torch.zeros(3, 2, device=device), 2, "local_ids: expected an int32"),
        (torch.zeros(3, 2, dtype=torch.int32, device=device), 0, "num_local_experts: expected at least 1"),
    ):
        with pytest.raises(ValueError, match=text):
            expert_major(ids, experts)


@pytest.mark.parametrize(("rows", "k", "experts"), SIZES)
def test_gradients_of_moving_rows(device: str, rows: int, k: int, experts: int) -> None:
    ids = random_ids(1, rows, k, experts).to(device)
    layout = expert_major(ids, experts)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 3, generator=g, dtype=torch.float64).to(device).requires_grad_()
    weights = torch.randn(rows, k, generator=g, dtype=torch.float64).to(device).requires_grad_()

    def there_and_back(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return sum_slots(take_rows(x, layout).sin(), weights, layout)

    named = (ids >= 0).to(x.dtype) * weights
    torch.testing.assert_close(there_and_back(x, weights), x.sin() * named.sum(1, keepdim=True))
    assert torch.autograd.gradcheck(there_and_back, (x, weights))


def test_what_is_unspecified_stays_out(device: str) -> None:
    """NaN in rows without a pair, and in slots without one: neither results nor gradients see them."""
    ids = torch.tensor([[-1, -1], [0, 1], [1, -1]], dtype=torch.int32, device=device)
    layout = expert_major(ids, 2)
    x = torch.ones(3, 4, device=device)
    x[0] = torch.nan
    x.requires_grad_()
    slots = take_rows(x, layout)
    assert slots[:3].eq(1).all() and slots[3:].eq(0).all()
    spoilt = torch.cat([slots[:3], torch.full((3, 4), torch.nan, device=device)])
    spoilt.retain_grad()
    weights = torch.tensor([[torch.nan, torch.nan], [2, 3], [5, torch.nan]], device=device)
    weights = torch.where(ids >= 0, weights, 0).requires_grad_()
    y = sum_slots(spoilt, weights, layout)
    assert y[:, 0].tolist() == [0, 5, 5]
    y.sum().backward()
    assert spoilt.grad is not None and spoilt.grad[:, 0].tolist() == [2, 3, 5, 0, 0, 0]
    assert x.grad is not None and x.grad[:, 0].tolist() == [0, 5, 5]
    assert weights.grad is not None and weights.grad.tolist() == [[0, 0], [4, 4], [4, 0]]


def test_sums_are_float32_in_the_order_of_ids_and_rounded_once(device: str) -> None:
    rows, k, experts = 50, 8, 8
    g = torch.Generator().manual_seed(5)
    ids = torch.rand(rows, experts, generator=g).topk(k).indices.int()
    layout = expert_major(ids.to(device), experts)
    slots = (torch.randn(rows * k, 6, generator=g) * 2.0 ** torch.randint(-8, 9, (rows * k, 6), generator=g)).bfloat16()
    weights = torch.rand(rows, k, generator=g)
    got = sum_slots(slots.to(device), weights.to(device), layout).cpu()
    expected, positions = torch.zeros(rows, 6), layout.positions.cpu()
    for column in range(k):
        expected = expected + slots[positions[:, column]].float() * weights[:, column : column + 1]
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_grouped_mm(device: str, dtype: torch.dtype) -> None:
    """With an empty group, a full one, and slots behind the last: whichever product this device and dtype take."""
    offsets = torch.tensor([0, 5, 5, 12], dtype=torch.int32, device=device)
    g = torch.Generator().manual_seed(3)
    rows = torch.randn(16, 8, generator=g).to(device, dtype).requires_grad_()
    weight = torch.randn(4, 24, 8, generator=g).to(device, dtype).requires_grad_()
    cotangent = torch.randn(16, 24, generator=g).to(device, dtype)
    with nan_in_fresh_tensors():
        grouped_mm(rows, weight, offsets).backward(cotangent)
        got = grouped_mm(rows, weight, offsets)[:12], rows.grad[:12], weight.grad  # type: ignore[index]
    own = [t.detach().double().requires_grad_() for t in (rows, weight)]
    groups = [own[0][a:b] @ own[1][e].t() for e, (a, b) in enumerate([(0, 0), (0, 5), (5, 5), (5, 12)])]
    torch.cat(groups).backward(cotangent[:12].double())
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 2e-2}
    for mine, theirs in zip(got, (torch.cat(groups), own[0].grad[:12], own[1].grad), strict=True):  # type: ignore[index]
        torch.testing.assert_close(mine.double(), theirs, **tolerance)


def test_the_loop_is_a_proper_op(device: str) -> None:
    offsets = torch.tensor([2, 5], dtype=torch.int32, device=device)
    rows, weight = torch.randn(6, 3, device=device, requires_grad=True), torch.randn(2, 4, 3, device=device)
    torch.library.opcheck(torch.ops.moe_ep_experts.grouped_mm.default, (rows, weight.requires_grad_(), offsets))
    torch.library.opcheck(torch.ops.moe_ep_experts.grouped_mm_weight_grad.default,
                          (torch.randn(6, 4, device=device), rows.detach(), offsets))
