"""The Python API: names, defaults and validation of the reference, and what the classes add to the ops."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BY_NAME, Case, Step, backend_config, make_group
from ranks import Rank, RankPool

import torch_moe_ep
from torch_moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpDispatchResult,
    NVLinkOneSidedAlltoAll,
    NVLinkOneSidedConfig,
    QuantFormat,
    ShmOneSidedAlltoAll,
    ShmOneSidedConfig,
    available_communication_backends,
    create_communication,
    is_communication_backend,
    register_communication,
)
from torch_moe_ep.communication import _REGISTRY


def params(**changes: Any) -> MoEEpCommParams:
    values: dict[str, Any] = {"num_experts": 8, "top_k": 2, "max_tokens_per_rank": 16, "hidden_size": 64}
    return MoEEpCommParams(**{**values, **changes})


@pytest.mark.parametrize("hidden", [1, 16, 37, 128, 200, 7168])
@pytest.mark.parametrize(
    "name, expected",
    [
        ("BF16", lambda h: 2 * h),
        ("FP16", lambda h: 2 * h),
        ("FP8PerTensor", lambda h: h),
        ("DeepSeekFp8", lambda h: h + 4 * -(-h // 128)),
        ("MXFP8", lambda h: h + -(-h // 32)),
        ("NVFP4", lambda h: -(-h // 2) + -(-h // 16)),
        ("MXFP4", lambda h: -(-h // 2) + -(-h // 32)),
    ],
)
def test_bytes_of_a_dispatched_token(name: str, expected: Callable[[int], int], hidden: int) -> None:
    got = params(hidden_size=hidden, dispatch_format=QuantFormat[name]).dispatch_bytes_per_token
    assert got == expected(hidden)


@pytest.mark.parametrize("dtype, itemsize", [(None, 2), (torch.float16, 2), (torch.float32, 4), (torch.float64, 8)])
def test_bytes_of_an_unquantized_token(dtype: torch.dtype | None, itemsize: int) -> None:
    assert params(dtype=dtype).dispatch_bytes_per_token == 64 * itemsize


def test_formats_of_weights_are_refused() -> None:
    assert {f.name for f in QuantFormat} == {
        "BF16", "FP16", "FP8PerTensor", "DeepSeekFp8", "MXFP8", "NVFP4", "MXFP4", "MXINT4", "INT4"
    }
    for quant_format in (QuantFormat.INT4, QuantFormat.MXINT4):
        with pytest.raises(ValueError, match=f"dispatch_format: .*{quant_format.name}.*BF16.*MXFP4"):
            params(dispatch_format=quant_format)


@pytest.mark.parametrize("field", ["num_experts", "top_k", "max_tokens_per_rank", "hidden_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8", None])
def test_sizes_of_params(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"MoEEpCommParams.{field}: expected a positive int, got {value!r}"):
        params(**{field: value})


def test_params() -> None:
    names = [f.name for f in dataclasses.fields(MoEEpCommParams)]
    assert names == [
        "num_experts", "top_k", "max_tokens_per_rank", "hidden_size", "dtype", "dispatch_format", "invalid_expert_id"
    ]
    assert (params().dtype, params().dispatch_format, params().invalid_expert_id) == (None, None, -1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params().top_k = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="top_k: expected at most num_experts = 8, got 9"):
        params(top_k=9)
    for invalid in (0, 7):
        with pytest.raises(ValueError, match=rf"invalid_expert_id: .*\[0, num_experts=8\), got {invalid}"):
            params(invalid_expert_id=invalid)
    assert params(invalid_expert_id=8).invalid_expert_id == 8
    with pytest.raises(TypeError, match="dispatch_format: expected a QuantFormat or None, got 'MXFP8'"):
        params(dispatch_format="MXFP8")


def test_top_k_beyond_the_ops() -> None:
    with pytest.raises(ValueError, match="MoEEpCommParams.top_k: ShmOneSidedAlltoAll takes at most 32, got 33"):
        create_communication(BootstrapConfig(1, 0), params(num_experts=64, top_k=33), "shm_one_sided")


@pytest.mark.parametrize(
    "experts, ep_size, expected", [(10, 4, [3, 3, 2, 2]), (8, 4, [2] * 4), (3, 5, [1, 1, 1, 0, 0])]
)
def test_local_experts(experts: int, ep_size: int, expected: list[int]) -> None:
    blocks = [params(num_experts=experts).local_experts(rank, ep_size) for rank in range(ep_size)]
    assert [len(block) for block in blocks] == expected
    assert [expert for block in blocks for expert in block] == list(range(experts))


# Name, type and default as the public reference of the class states them, in its order.
OPTIONS = {
    "backend_name": ("str", "nvlink_one_sided"),
    "extra_payload_bytes_per_token": ("int", 0),
    "eplb_stats_num_experts": ("int", 0),
    "enable_rank_mask": ("bool", False),
    "use_low_precision_combine": ("bool", False),
    "comm_backend": ("CommBackend | None", None),
    "cft": ("bool | None", None),
    "cft_max_tokens_for_dispatch": ("int", 128),
    "cft_max_tokens_for_combine": ("int", 128),
    "lamport": ("bool | None", None),
    "lamport_max_tokens": ("int | None", None),
    "timeout_sec": ("int", 300),
    "enable_pdl": ("bool | None", None),
}


def test_options_of_the_reference() -> None:
    fields = {f.name: (f.type, f.default) for f in dataclasses.fields(NVLinkOneSidedConfig)}
    assert fields == OPTIONS and list(fields) == list(OPTIONS)
    shm = {f.name: (f.type, f.default) for f in dataclasses.fields(ShmOneSidedConfig)}
    assert shm.pop("backend_name") == ("str", "shm_one_sided")
    assert shm.items() <= OPTIONS.items()


BAD_OPTIONS = [
    ("extra_payload_bytes_per_token", -1, ValueError, "expected at least 0, got -1"),
    ("extra_payload_bytes_per_token", 1.5, TypeError, "expected an int, got 1.5"),
    ("eplb_stats_num_experts", -1, ValueError, "expected at least 0, got -1"),
    ("eplb_stats_num_experts", "8", TypeError, "expected an int, got '8'"),
    ("enable_rank_mask", None, TypeError, "expected True or False, got None"),
    ("enable_rank_mask", 1, TypeError, "expected True or False, got 1"),
    ("comm_backend", object, TypeError, "expected an object with allgather(obj) and barrier(), got "),
    ("timeout_sec", 0, ValueError, "expected at least 1, got 0"),
    ("timeout_sec", -300, ValueError, "expected at least 1, got -300"),
    ("timeout_sec", True, TypeError, "expected an int, got True"),
    ("use_low_precision_combine", None, TypeError, "expected True or False, got None"),
    ("cft", 1, TypeError, "expected True, False or None, got 1"),
    ("cft_max_tokens_for_dispatch", -1, ValueError, "expected at least 0, got -1"),
    ("cft_max_tokens_for_combine", None, TypeError, "expected an int, got None"),
    ("lamport", "on", TypeError, "expected True, False or None, got 'on'"),
    ("lamport_max_tokens", 0, ValueError, "expected at least 1, got 0"),
    ("lamport_max_tokens", 1.0, TypeError, "expected an int, got 1.0"),
    ("enable_pdl", 0, TypeError, "expected True, False or None, got 0"),
]


@pytest.mark.parametrize("config", [NVLinkOneSidedConfig, ShmOneSidedConfig])
@pytest.mark.parametrize("option, value, kind, text", BAD_OPTIONS)
def test_bad_options(option: str, value: Any, kind: type[Exception], text: str, config: type) -> None:
    if option in {f.name for f in dataclasses.fields(config)}:
        with pytest.raises(kind, match=re.escape(f"{config.__name__}.{option}: {text}")):
            config(**{option: value})
    else:
        with pytest.raises(TypeError, match=option):
            config(**{option: value})


def test_lamport_and_cft_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="lamport: True cannot be combined with cft=True"):
        NVLinkOneSidedConfig(lamport=True, cft=True)
    for lamport, cft in ((True, None), (True, False), (None, True), (False, True)):
        NVLinkOneSidedConfig(lamport=lamport, cft=cft)


def test_bootstrap() -> None:
    names = [f.name for f in dataclasses.fields(BootstrapConfig)]
    assert names == [
        "world_size", "rank", "stream", "auto_bootstrap", "nccl_comm", "process_group", "tcp_store", "device"
    ]
    for field, value, text in (
        ("world_size", 0, "expected an int of at least 1, got 0"),
        ("world_size", "2", "expected an int of at least 1, got '2'"),
        ("rank", -1, "expected an int of at least 0, got -1"),
        ("rank", True, "expected an int of at least 0, got True"),
        ("rank", 2, "expected less than world_size = 2, got 2"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"BootstrapConfig.{field}: {text}")):
            BootstrapConfig(**{"world_size": 2, "rank": 0, field: value})


def test_registry() -> None:
    assert is_communication_backend("shm_one_sided") and is_communication_backend(NVLinkOneSidedConfig())
    assert not is_communication_backend("nccl") and not is_communication_backend(3)
    with pytest.raises(KeyError, match="unknown communication backend 'nccl'; registered: .*nvlink_one_sided.*shm_one"):
        create_communication(BootstrapConfig(1, 0), params(), "nccl")
    with pytest.raises(TypeError, match="backend: expected a name or a config with a backend_name, got 3"):
        create_communication(BootstrapConfig(1, 0), params(), 3)

    @register_communication("echo")
    class Echo(MoEEpCommunication):
        supported = True

        def __init__(self, bootstrap: Any, params: Any, config: Any = None, word: str = "") -> None:
            super().__init__(bootstrap, params)
            self.config, self.word = config, word

        @classmethod
        def is_platform_supported(cls) -> bool:
            return cls.supported

        def dispatch(self, hidden_states: Any, topk_ids: Any, *args: Any, **kwargs: Any) -> MoEEpDispatchResult:
            return MoEEpDispatchResult(hidden_states, topk_ids, None, len(hidden_states))

        def combine(self, expert_output: Any, *, output: Any = None) -> Any:
            return expert_output

    try:
        assert Echo.backend_name == "echo" and is_communication_backend("echo")
        assert available_communication_backends() == sorted({*available_communication_backends(), "echo"})
        made = create_communication(BootstrapConfig(4, 3), params(num_experts=10), "echo", word="hello")
        assert isinstance(made, Echo) and made.word == "hello" and made.config is None
        assert (made.ep_rank, made.ep_size, made.local_experts, made.num_local_experts) == (3, 4, range(8, 10), 2)
        assert made.is_workload_feasible(16) and not made.is_workload_feasible(17)
        assert made.get_combine_input_buffer(torch.float32) is None
        made.destroy()
        config = dataclasses.replace(ShmOneSidedConfig(), backend_name="echo")
        assert create_communication(BootstrapConfig(1, 0), params(), config).config is config  # type: ignore[attr-defined]
        Echo.supported = False
        assert "echo" not in available_communication_backends() and is_communication_backend("echo")
        with pytest.raises(RuntimeError, match="Echo cannot run on this machine"):
            create_communication(BootstrapConfig(1, 0), params(), "echo")
    finally:
        del _REGISTRY["echo"]


def test_platforms() -> None:
    assert ShmOneSidedAlltoAll.is_platform_supported() and ShmOneSidedAlltoAll.unsupported_reason() is None
    assert "shm_one_sided" in available_communication_backends()
    assert not ShmOneSidedAlltoAll.supports_cuda_graph and NVLinkOneSidedAlltoAll.supports_cuda_graph
    reason = NVLinkOneSidedAlltoAll.unsupported_reason()
    assert ("nvlink_one_sided" in available_communication_backends()) == (reason is None)
    if reason is None:
        assert torch.cuda.is_available() and torch_moe_ep._C.has_cuda
    else:
        text = re.escape(f"NVLinkOneSidedAlltoAll cannot run on this machine: {reason}")
        for backend in ("nvlink_one_sided", NVLinkOneSidedConfig()):
            with pytest.raises(RuntimeError, match=text):
                create_communication(BootstrapConfig(1, 0), params(), backend)


CASE = dataclasses.replace(BY_NAME["order_of_sums"], name="class", tokens=(9, 5, 12), spare_capacity=4, eplb=3)


def class_dispatch(group: MoEEpCommunication, step: Step, **options: Any) -> MoEEpDispatchResult:
    inputs = step.inputs
    on = lambda tensor: None if tensor is None else tensor.to(step.device)  # noqa: E731
    return group.dispatch(
        on(inputs.hidden_states), on(inputs.topk_ids), on(inputs.topk_weights),
        runtime_max_tokens_per_rank=step.tokens_per_rank, eplb_local_stats=on(inputs.eplb_local_stats), **options,
    )


def run_class(rank: Rank) -> None:
    w, device = rank.world_size, rank.device
    group = make_group(CASE, w, rank.rank, device)
    h, capacity = CASE.hidden, group.params.max_tokens_per_rank
    with pytest.raises(RuntimeError, match="combine called before dispatch"):
        group.combine(torch.zeros(0, h, device=device))
    with pytest.raises(RuntimeError, match="get_combine_input_buffer called before dispatch"):
        group.get_combine_input_buffer(torch.float32)
    for seed, form in enumerate(("rows", "ranks", "output", "buffer")):
        step = Step(CASE, w, rank.rank, seed, device)
        got = class_dispatch(group, step)
        with pytest.raises(RuntimeError, match="dispatch called twice without an intervening combine"):
            class_dispatch(group, step)
        assert got.tokens_per_rank == step.tokens_per_rank
        assert torch.equal(got.topk_ids.cpu(), step.expected.topk_ids)
        holds = step.expected.holds_token
        for name in ("hidden_states", "topk_weights"):
            mine, theirs = getattr(got, name).cpu()[holds], getattr(step.expected, name)[holds]
            assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32)), name
        assert got.eplb_gathered_stats is not None and step.expected.eplb_gathered_stats is not None
        assert torch.equal(got.eplb_gathered_stats.cpu(), step.expected.eplb_gathered_stats)
        assert got.hidden_states_scale is None
        rows, output = step.expert_output.to(device), None
        if form == "ranks":
            rows = rows.unflatten(0, (w, step.tokens_per_rank))
        if form == "output":
            output = torch.full_like(step.expected_out, torch.nan, device=device)
        if form == "buffer":
            buffer = group.get_combine_input_buffer(rows.dtype)
            assert buffer is not None and buffer.shape == rows.shape and buffer.device == rows.device
            rows = buffer.copy_(rows)
        with pytest.raises(ValueError, match=r"expert_output: expected 2 or 3 dimensions, got shape \(\d+,\)"):
            group.combine(rows.flatten())
        with pytest.raises(ValueError, match="expert_output"):  # a refused combine leaves the step open
            group.combine(rows.flatten(0, -2)[:-1])
        result = group.combine(rows, output=output)
        assert output is None or result is output
        assert torch.equal(result.cpu(), step.expected_out)
        with pytest.raises(RuntimeError, match="combine called before dispatch"):
            group.combine(rows)
    step = Step(CASE, w, rank.rank, 9, device)
    for wrong in (0, -1, capacity + 1):
        with pytest.raises(ValueError, match=rf"runtime_max_tokens_per_rank: expected 1..{capacity} .*got {wrong}"):
            group.dispatch(step.inputs.hidden_states, step.inputs.topk_ids, runtime_max_tokens_per_rank=wrong)
    # None is the capacity.
    got = group.dispatch(step.inputs.hidden_states.to(device), step.inputs.topk_ids.to(device))
    assert got.tokens_per_rank == capacity and got.hidden_states.shape == (w * capacity, h)
    assert got.topk_weights is None and got.eplb_gathered_stats is None
    group.combine(torch.zeros(w * capacity, h, device=device))
    mask = group.active_rank_mask([0])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="active_rank_mask: needs a config with enable_rank_mask=True"):
        class_dispatch(group, step, active_rank_mask=mask)
    with pytest.raises(ValueError, match=rf"active_ranks: expected ranks in 0..{w - 1}, got {w}"):
        group.active_rank_mask([w])  # type: ignore[attr-defined]
    group.destroy()
    group.destroy()
    for use in (
        lambda: class_dispatch(group, step),
        lambda: group.combine(step.expert_output),
        lambda: group.window_bytes,  # type: ignore[attr-defined]
        lambda: group.set_active_ranks([0]),  # type: ignore[attr-defined]
    ):
        with pytest.raises(RuntimeError, match=f"{type(group).__name__} has been destroyed; create a new one"):
            use()


@pytest.mark.parametrize("ep_size", [1, 3])
def test_class(ranks: Callable[[int], RankPool], ep_size: int) -> None:
    ranks(ep_size).run(run_class)


def run_scales_and_masks(rank: Rank) -> None:
    """Through the class: quantized rows with their scales, and a mask per call."""
    w, device = rank.world_size, rank.device
    case: Case = dataclasses.replace(BY_NAME["float8_with_float_scales"], name="class scales", tokens=(4, 5, 6),
                                     masked=(1,))
    group = make_group(case, w, rank.rank, device)
    step = Step(case, w, rank.rank, 0, device)
    mask = group.active_rank_mask([0, 2])  # type: ignore[attr-defined]
    scale, expected = step.inputs.hidden_states_scale, step.expected.hidden_states_scale
    assert scale is not None and expected is not None
    got = class_dispatch(group, step, hidden_states_scale=scale.to(device), active_rank_mask=mask)
    holds = step.expected.holds_token
    assert got.hidden_states_scale is not None and got.hidden_states.dtype == case.dtype
    assert torch.equal(got.hidden_states_scale.cpu()[holds].view(torch.int32), expected[holds].view(torch.int32))
    assert torch.equal(got.topk_ids.cpu(), step.expected.topk_ids)
    result = group.combine(step.expert_output.to(device), active_rank_mask=mask)  # type: ignore[call-arg]
    assert torch.equal(result.cpu(), step.expected_out)
    group.destroy()


def test_class_with_scales_and_masks(ranks: Callable[[int], RankPool]) -> None:
    ranks(3).run(run_scales_and_masks)


PROGRAM = '''
import torch
import torch.distributed as dist
from flashinfer.moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    NVLinkOneSidedConfig,
    create_communication,
)

rank, world_size = dist.get_rank(), dist.get_world_size()
device = CONFIG_DEVICE
comm = create_communication(
    BootstrapConfig(world_size=world_size, rank=rank, stream=0),
    MoEEpCommParams(num_experts=8, top_k=2, max_tokens_per_rank=32, hidden_size=64, dtype=torch.float32),
    backend=NVLinkOneSidedConfig(timeout_sec=30),
)
torch.manual_seed(rank)
hidden = torch.randn(10 + rank, 64, device=device)
logits = torch.randn(10 + rank, 8, device=device)
weights, ids = torch.topk(torch.softmax(logits, -1), 2)
received = comm.dispatch(hidden, ids.to(torch.int32), weights, runtime_max_tokens_per_rank=16)
assert received.tokens_per_rank == 16 and received.hidden_states.shape == (world_size * 16, 64)
experts = comm.get_combine_input_buffer(torch.float32)
mine = torch.zeros_like(received.topk_weights)
for expert in comm.local_experts:  # expert i multiplies by i + 1
    mine += torch.where(received.topk_ids == expert, received.topk_weights * (expert + 1), 0.0)
experts.copy_(torch.where(mine.sum(1, keepdim=True) > 0, received.hidden_states * mine.sum(1, keepdim=True), 0.0))
output = comm.combine(experts, output=torch.empty_like(hidden))
comm.destroy()
error = (output - hidden * (weights * (ids + 1)).sum(1, keepdim=True)).abs().max().item()
'''


def run_program(rank: Rank, source: str) -> float:
    names: dict[str, Any] = {"CONFIG_DEVICE": rank.device}
    exec(compile(source, "program", "exec"), names)
    return names["error"]


def test_a_program_written_for_flashinfer(ranks: Callable[[int], RankPool], device: str) -> None:
    """Only the import changes; on a CPU the name of the config too."""
    source = PROGRAM.replace("flashinfer.moe_ep", "torch_moe_ep")
    if device == "cpu":
        source = source.replace("NVLinkOneSidedConfig", type(backend_config(device)).__name__)
    assert max(ranks(4).run(run_program, source)) < 1e-4
