"""The one list of dispatch/combine cases, their inputs, and a step that runs a case and compares every bit.

Inputs come from a seed and the rank alone, made on the CPU and then moved: any rank can make the inputs of any other,
and a GPU gets the same ones.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import reference
import torch
from reference import Inputs, same_bytes

import torch_moe_ep
from torch_moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    NVLinkOneSidedConfig,
    QuantFormat,
    ShmOneSidedConfig,
    TorchDistributedConfig,
    create_communication,
)

TIMEOUT_SEC = 20
"""Of every communicator here: far beyond what a step takes, and short enough for a broken protocol to show."""


@dataclass(frozen=True)
class Case:
    """One step. Legend (T, K, H, E, R, C) as in csrc/ep.h."""

    name: str
    tokens: tuple[int, ...] = (5, 3, 0, 7)  # T of rank r is tokens[r % len(tokens)]
    top_k: int = 2  # K
    hidden: int = 16  # H
    num_experts: int = 16  # E
    spare_rows: int = 0  # R beyond the largest T
    spare_capacity: int = 0  # C beyond R
    dtype: torch.dtype = torch.float32
    row_shape: tuple[int, ...] | None = None  # of hidden_states, where it is not [T, H]
    row_dtype: torch.dtype | None = None  # of hidden_states, where it is not dtype
    id_dtype: torch.dtype = torch.int64
    weights: torch.dtype | None = torch.float32
    scale: tuple[torch.dtype, int] | None = None  # dtype and width of hidden_states_scale
    eplb: int | None = None  # n
    routing: str = "uniform"  # a key of _route
    strides: str = "contiguous"  # or transposed, sliced, expanded
    invalid_expert_id: int = -1
    masked: tuple[int, ...] = ()  # ranks that take no part (those below W)
    combine_dtype: torch.dtype | None = None  # of expert outputs; None is dtype
    dispatch_format: QuantFormat | None = None

    def num_tokens(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]

    def tokens_per_rank(self, ep_size: int) -> int:
        return max(self.num_tokens(rank) for rank in range(ep_size)) + self.spare_rows

    def params(self, ep_size: int) -> MoEEpCommParams:
        return MoEEpCommParams(
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens_per_rank=max(1, self.tokens_per_rank(ep_size) + self.spare_capacity),
            hidden_size=max(1, self.hidden),
            dtype=self.dtype,
            dispatch_format=self.dispatch_format,
            invalid_expert_id=self.invalid_expert_id,
        )

    def options(self) -> dict[str, Any]:
        extra = 0 if self.scale is None or self.dispatch_format else self.scale[0].itemsize * self.scale[1]
        return {
            "extra_payload_bytes_per_token": extra,
            "eplb_stats_num_experts": self.eplb or 0,
            "enable_rank_mask": bool(self.masked),
            "timeout_sec": TIMEOUT_SEC,
        }

    def active(self, ep_size: int) -> list[int] | None:
        return [rank for rank in range(ep_size) if rank not in self.masked] if self.masked else None


F8 = torch.float8_e4m3fn
CASES = [
    Case("plain"),
    Case("one_token", tokens=(1,)),
    Case("even", tokens=(6,), top_k=4, routing="distinct"),
    Case("no_tokens", tokens=(0,), spare_rows=3),
    Case("no_rows_at_all", tokens=(0,)),
    Case("rank_without_tokens", tokens=(0, 4)),
    Case("smaller_step_than_capacity", spare_rows=2, spare_capacity=9, top_k=4),
    Case("nowhere", routing="nowhere"),
    Case("dirty_ids_int64", routing="dirty", top_k=6, tokens=(9, 4)),
    Case("dirty_ids_int32", routing="dirty", top_k=6, tokens=(9, 4), id_dtype=torch.int32),
    Case("invalid_id_is_num_experts", routing="dirty", top_k=4, invalid_expert_id=16),
    Case("invalid_id_is_12345", routing="dirty", top_k=4, invalid_expert_id=12345),
    Case("invalid_id_is_the_least_int32", routing="dirty", top_k=4, invalid_expert_id=-(2**31)),
    Case("all_to_one_rank", routing="one_rank", top_k=3),
    Case("all_local", routing="local", top_k=3),
    Case("none_to_rank_0", routing="avoid_rank_0", top_k=3),
    Case("duplicates", routing="duplicates", top_k=8),
    Case("uneven_experts", num_experts=13, top_k=5, routing="distinct"),
    Case("fewer_experts_than_ranks", num_experts=3, top_k=3, routing="distinct"),
    Case("one_expert", num_experts=1, top_k=1),
    Case("top_1", top_k=1, id_dtype=torch.int32),
    Case("top_22", top_k=22, num_experts=64, routing="distinct", dtype=torch.bfloat16),
    Case("top_32", top_k=32, num_experts=40, routing="dirty"),
    Case("order_of_sums", tokens=(16,), top_k=8, num_experts=64, hidden=64, routing="distinct"),
    Case("odd_hidden", hidden=37, top_k=4),
    Case("long_rows", tokens=(2,), hidden=1501, top_k=4, routing="distinct"),
    Case("bfloat16", dtype=torch.bfloat16, hidden=40, top_k=4, routing="distinct"),
    Case("float16", dtype=torch.float16, hidden=40, top_k=4, routing="distinct", weights=torch.float16),
    Case("float64", dtype=torch.float64, hidden=24, top_k=4, routing="distinct", weights=torch.float64),
    Case("bytes_with_odd_scales", dtype=torch.uint8, hidden=37, scale=(torch.uint8, 5), combine_dtype=torch.bfloat16),
    Case("float8_with_float_scales", dtype=F8, hidden=130, scale=(torch.float32, 2), combine_dtype=torch.bfloat16,
         dispatch_format=QuantFormat.DeepSeekFp8, weights=torch.bfloat16),
    Case("packed_fp4", dtype=torch.bfloat16, hidden=32, row_shape=(16,), row_dtype=torch.uint8, scale=(F8, 2),
         dispatch_format=QuantFormat.NVFP4),
    Case("rows_of_two_dimensions", hidden=24, row_shape=(4, 6)),
    Case("no_weights", weights=None, top_k=4),
    Case("eplb", eplb=11),
    Case("nothing_but_ids", weights=None, hidden=0),
    Case("zero_width_extras", scale=(torch.uint8, 0), eplb=0),
    Case("transposed", strides="transposed", scale=(torch.int16, 3), hidden=20),
    Case("sliced", strides="sliced", scale=(torch.uint8, 3), eplb=6, id_dtype=torch.int32),
    Case("expanded", strides="expanded", scale=(torch.uint8, 3), tokens=(5, 3)),
    Case("masked_rank", masked=(1,), top_k=4, eplb=3, tokens=(4, 5, 6)),
    Case("masked_ranks", masked=(0, 2), top_k=4, tokens=(4, 5, 6), routing="dirty"),
]
BY_NAME = {case.name: case for case in CASES}


def _generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32("/".join(map(str, key)).encode()))


def _route(case: Case, ep_size: int, rank: int, g: torch.Generator) -> torch.Tensor:
    """[T, K] int64 ids."""
    t, k, e = case.num_tokens(rank), case.top_k, case.num_experts
    owners = torch.tensor(reference.expert_owners(e, ep_size))

    def among(experts: torch.Tensor) -> torch.Tensor:
        if len(experts) == 0:
            return torch.full((t, k), -1)
        return experts[torch.randint(len(experts), (t, k), generator=g)]

    match case.routing:
        case "uniform":
            return among(torch.arange(e))
        case "distinct":
            return torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(t)] or [torch.empty(k)])[:t].long()
        case "one_rank":
            return among((owners == owners.max()).nonzero().flatten())
        case "local":
            return among((owners == rank).nonzero().flatten())
        case "avoid_rank_0":
            return among((owners != 0).nonzero().flatten())
        case "duplicates":
            return among(torch.randint(e, (2,), generator=g))
        case "nowhere":
            return torch.full((t, k), -1)
        case "dirty":
            bad = [-1, e, e + 5, 2**31 - 1, -(2**31)]
            if case.id_dtype == torch.int64:
                bad += [2**32, 2**32 + 1, 2**33 + e - 1, -(2**32), 2**63 - 1, -(2**63)]
            wrong = torch.tensor(bad)[torch.randint(len(bad), (t, k), generator=g)]
            return torch.where(torch.rand(t, k, generator=g) < 0.4, wrong, among(torch.arange(e)))
    raise ValueError(case.routing)


def _random_bits(shape: Sequence[int], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Any bit pattern, NaNs with payloads among them: a dispatch moves bytes."""
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8, generator=g).view(dtype).reshape(shape)


def make_inputs(case: Case, ep_size: int, rank: int, seed: int) -> Inputs:
    """The contiguous CPU inputs of a rank."""
    g = _generator(case.name, ep_size, rank, seed)
    t, k = case.num_tokens(rank), case.top_k
    inputs = Inputs(
        _random_bits((t, *(case.row_shape or (case.hidden,))), case.row_dtype or case.dtype, g),
        _route(case, ep_size, rank, g).to(case.id_dtype),
        None if case.weights is None else _random_bits((t, k), case.weights, g),
        None if case.scale is None else _random_bits((t, case.scale[1]), case.scale[0], g),
        None if case.eplb is None else torch.randint(-(2**31), 2**31, (case.eplb,), generator=g).int(),
    )
    if case.strides == "expanded":
        for name in ("hidden_states", "topk_ids", "topk_weights", "hidden_states_scale"):
            tensor = getattr(inputs, name)
            setattr(inputs, name, tensor[:1].expand_as(tensor).contiguous())
    return inputs


def place(tensor: torch.Tensor | None, device: torch.device | str, strides: str) -> torch.Tensor | None:
    """The same values on ``device``, in memory as ``strides`` says."""
    if tensor is None:
        return None
    tensor = tensor.to(device)
    match strides:
        case "transposed" if tensor.dim() == 2:
            return tensor.t().contiguous().t()
        case "sliced":
            wide = torch.zeros(*(2 * n + 1 for n in tensor.shape), dtype=tensor.dtype, device=device)
            view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
            if tensor.dim() == 2 and tensor.shape[1] > 8:  # a slice whose rows stay contiguous
                view = wide[1::2, 3 : 3 + tensor.shape[1]]
            view.copy_(tensor)
            return view
        case "expanded" if tensor.dim() == 2:
            return tensor[:1].expand_as(tensor)
    return tensor


def make_expert_output(case: Case, ep_size: int, rank: int, seed: int, holds_token: torch.Tensor) -> torch.Tensor:
    """[W*R, H] of a rank: of such different magnitudes that the order of a sum shows, NaN in rows without a token."""
    g = _generator(case.name, ep_size, rank, seed, "expert output")
    shape = (len(holds_token), case.hidden)
    values = torch.randn(shape, generator=g, dtype=torch.float64)
    values *= 2.0 ** torch.randint(-8, 9, shape, generator=g)
    values[torch.rand(shape, generator=g) < 0.1] = -0.0
    values[~holds_token] = torch.nan
    return values.to(case.combine_dtype or case.dtype)


def rank_mask(ranks: Sequence[int] | None, ep_size: int) -> torch.Tensor | None:
    if ranks is None:
        return None
    words = [sum(1 << rank % 64 for rank in ranks if rank // 64 == word) for word in range(-(-ep_size // 64))]
    return torch.tensor(words, dtype=torch.uint64, device="cpu")


def backend_config(device: torch.device | str, **options: Any) -> NVLinkOneSidedConfig | ShmOneSidedConfig:
    """The config of the backend for a device; on a GPU every step takes the transport that pytest was told to test."""
    if torch.device(device).type != "cuda":
        return ShmOneSidedConfig(**options)
    transport: dict[str, Any] = {
        "lamport": {"lamport_max_tokens": 2**20},
        "fence": {"lamport": False, "cft": False},
        "counted": {"lamport": False, "cft": True},
    }[os.environ.get("MOE_EP_TEST_TRANSPORT", "lamport")]
    return NVLinkOneSidedConfig(**{**transport, **options})


def private_options(device: torch.device | str) -> dict[str, Any]:
    """What else a communicator needs for that transport: counted writes are emulated."""
    counted = os.environ.get("MOE_EP_TEST_TRANSPORT") == "counted" and torch.device(device).type == "cuda"
    return {"_emulate_cft": True} if counted else {}


def bootstrap_of(ep_size: int, rank: int, device: torch.device | str) -> BootstrapConfig:
    """Names the GPU: a backend over collectives would take the CPU for a group that serves both."""
    return BootstrapConfig(ep_size, rank, device=torch.cuda.current_device() if "cuda" in str(device) else None)


def make_group(
    case: Case, ep_size: int, rank: int, device: torch.device | str, *, namespace: str = "", backend: str = "one_sided",
    **options: Any,
) -> MoEEpCommunication:
    """A communicator with windows exactly as large as the case needs, or without any (backend "torch_distributed")."""
    config: Any
    private: dict[str, Any]
    if backend == "torch_distributed":
        config, private = TorchDistributedConfig(**options), {}
    else:
        config, private = backend_config(device, **{**case.options(), **options}), private_options(device)
    return create_communication(
        bootstrap_of(ep_size, rank, device), case.params(ep_size), config, namespace=namespace, **private
    )


def roomy_group(
    ep_size: int, rank: int, device: torch.device | str, *, namespace: str = "", backend: str = "one_sided"
) -> MoEEpCommunication:
    """A communicator on which every case fits (see :func:`group_for`)."""
    params = MoEEpCommParams(num_experts=64, top_k=32, max_tokens_per_rank=32, hidden_size=2048, dtype=torch.float64)
    bootstrap = bootstrap_of(ep_size, rank, device)
    if backend == "torch_distributed":
        return create_communication(bootstrap, params, TorchDistributedConfig(), namespace=namespace)
    config = backend_config(
        device, extra_payload_bytes_per_token=64, eplb_stats_num_experts=16, enable_rank_mask=True,
        timeout_sec=TIMEOUT_SEC,
    )
    return create_communication(bootstrap, params, config, namespace=namespace, **private_options(device))


def group_for(case: Case, group: MoEEpCommunication) -> Any:
    """``group`` as the functions take it, with the number of experts and the invalid id of ``case``."""
    return SimpleNamespace(
        comm=group.comm, order=group.order, ep_size=group.ep_size, timeout_sec=group.timeout_sec,
        params=case.params(group.ep_size),
    )


class Step:
    """One dispatch and its combine on one rank, and what they must give."""

    def __init__(
        self, case: Case, ep_size: int, rank: int, seed: int, device: torch.device | str = "cpu", *,
        between: Callable[[], Any] | None = None,
    ) -> None:
        """``between``: called between the starts and waits of ops in two phases; None makes them one op each."""
        self.case, self.rank, self.device, self.between = case, rank, device, between
        self.tokens_per_rank = case.tokens_per_rank(ep_size)
        self.what = f"case {case.name}, W={ep_size}, rank {rank}, seed {seed}"
        active = case.active(ep_size)
        inputs = [make_inputs(case, ep_size, r, seed) for r in range(ep_size)]
        received = [
            reference.dispatch(inputs, r, self.tokens_per_rank, case.num_experts, case.invalid_expert_id, active)
            for r in range(ep_size)
        ]
        outputs = [make_expert_output(case, ep_size, r, seed, received[r].holds_token) for r in range(ep_size)]
        self.inputs, self.expected, self.expert_output = inputs[rank], received[rank], outputs[rank]
        self.expected_out = reference.combine(
            inputs, outputs, rank, self.tokens_per_rank, case.num_experts, active
        )
        self.mask = rank_mask(active, ep_size)
        self.routing: torch.Tensor | None = None

    def _placed(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return place(tensor, self.device, self.case.strides)

    def _join(self) -> None:
        """Waits for the op without a copy: one to pageable memory that waits for a kernel holds a lock of the driver,
        which the other ranks of a process need in order to launch theirs."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.current_stream().synchronize()

    def dispatch(self, group: Any) -> None:
        """Runs it and compares all of it."""
        expected = self.expected
        hidden, ids = self._placed(self.inputs.hidden_states), self._placed(self.inputs.topk_ids)
        assert hidden is not None and ids is not None
        args = (group_for(self.case, group), hidden, ids, self._placed(self.inputs.topk_weights))
        options: dict[str, Any] = {
            "hidden_states_scale": self._placed(self.inputs.hidden_states_scale),
            "tokens_per_rank": self.tokens_per_rank,
            "eplb_local_stats": self._placed(self.inputs.eplb_local_stats),
            "active_rank_mask": self.mask,
        }
        if self.between is None:
            got = torch_moe_ep.dispatch(*args, **options)
        else:
            pending = torch_moe_ep.dispatch_start(*args, **options)
            self.between()
            got = torch_moe_ep.dispatch_wait(pending)
        self.routing = got.routing
        self._join()
        assert same_bytes(got.topk_ids, expected.topk_ids), f"topk_ids: {self.what}: {got.topk_ids}"
        for name in ("hidden_states", "topk_weights", "hidden_states_scale"):
            mine, theirs = getattr(got, name), getattr(expected, name)
            assert (mine is None) == (theirs is None), f"{name}: {self.what}"
            if theirs is not None:
                assert mine.shape == theirs.shape, f"{name}: {self.what}: shape {tuple(mine.shape)}"
                rows, theirs = mine.cpu()[expected.holds_token], theirs[expected.holds_token]
                assert same_bytes(rows, theirs), f"{name}: {self.what}: {rows}, expected {theirs}"
        stats = expected.eplb_gathered_stats
        assert (got.eplb_gathered_stats is None) == (stats is None), f"eplb_gathered_stats: {self.what}"
        if stats is not None:
            assert same_bytes(got.eplb_gathered_stats, stats), f"eplb_gathered_stats: {self.what}"

    def combine(self, group: Any, into: torch.Tensor | None = None) -> None:
        """Runs it, ``into`` a tensor where one is given, and compares every bit."""
        assert self.routing is not None
        if into is not None:
            into.fill_(torch.nan)
        rows = self._placed(self.expert_output) if self.case.strides != "expanded" else self.expert_output
        assert rows is not None
        args = (group_for(self.case, group), rows.to(self.device), self.routing)
        options: dict[str, Any] = {"num_tokens": len(self.inputs.topk_ids), "active_rank_mask": self.mask}
        if self.between is None:
            got = torch_moe_ep.combine(*args, **options, out=into)
        else:
            assert into is None
            pending = torch_moe_ep.combine_start(*args, **options)
            self.between()
            got = torch_moe_ep.combine_wait(pending)
        assert into is None or got is into, self.what
        self._join()
        assert same_bytes(got, self.expected_out), f"combine: {self.what}: {got}, expected {self.expected_out}"
