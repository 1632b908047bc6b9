"""The ops as PyTorch sees them: opcheck with every utility, and a Meta column that needs no communicator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Rank, RankPool
from tiny_model import EXPERTS, HIDDEN, TOP_K, open_group, tokens
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_moe_ep import MoEEpCommunication

ops = torch.ops.moe_ep
UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


@dataclass(frozen=True)
class Case:
    tokens: int = 5
    id_dtype: torch.dtype = torch.int32
    weights: bool = False
    scale: bool = False
    eplb: bool = False
    mask: bool = False
    transposed: bool = False


CASES = {
    "plain": Case(),
    "int64_ids": Case(id_dtype=torch.int64),
    "weights": Case(weights=True),
    "scale": Case(scale=True),
    "eplb": Case(eplb=True),
    "mask": Case(mask=True),
    "everything": Case(id_dtype=torch.int64, weights=True, scale=True, eplb=True, mask=True),
    "no_tokens": Case(tokens=0, weights=True, scale=True),
    "transposed": Case(weights=True, transposed=True),
}


def open_roomy_group(rank: int, world_size: int, device: str) -> MoEEpCommunication:
    return open_group(
        rank, world_size, device, enable_rank_mask=True, eplb_stats_num_experts=3, extra_payload_bytes_per_token=16
    )


def dispatch_arguments(
    case: Case, order: torch.Tensor, comm: str, world_size: int, rank: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a dispatch whose token 1 goes nowhere, on the device of ``order``."""
    device = order.device
    generator = torch.Generator().manual_seed(rank)
    hidden = tokens(case.tokens, rank)
    ids = torch.randint(-1, EXPERTS + 1, (case.tokens, TOP_K), generator=generator).to(case.id_dtype)
    ids[1:2] = -1
    weights, scale = torch.rand(case.tokens, TOP_K, generator=generator), torch.arange(3 * case.tokens).view(-1, 3)
    if case.transposed:
        hidden, ids, weights = (t.t().contiguous().t() for t in (hidden, ids, weights))
    stats = torch.arange(3, dtype=torch.int32) + rank
    mask = torch.tensor(2**world_size - 1, dtype=torch.uint64)
    args = (
        hidden.to(device),
        ids.to(device),
        weights.to(device) if case.weights else None,
        scale.to(torch.uint8).to(device) if case.scale else None,
        order,
    )
    options = {
        "tokens_per_rank": case.tokens + 2,
        "num_experts": EXPERTS,
        "ep_size": world_size,
        "eplb_local_stats": stats.to(device) if case.eplb else None,
        # Beside CUDA tensors tracing takes CPU scalars only:
        "active_rank_mask": mask.reshape(() if device.type == "cuda" else 1) if case.mask else None,
        "comm": comm,
    }
    return args, options


def combine_arguments(
    dispatch_args: tuple[Any, ...], options: dict[str, Any], routing: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a combine of that dispatch, with expert outputs that differ in every row."""
    w, r = options["ep_size"], options["tokens_per_rank"]
    expert_output = torch.arange(w * r * HIDDEN, dtype=torch.float32).view(w * r, HIDDEN).to(routing.device)
    names = ("ep_size", "active_rank_mask", "comm")
    return (expert_output, routing, dispatch_args[4]), {"num_tokens": dispatch_args[0].shape[0]} | {
        name: options[name] for name in names
    }


def out_of(num_tokens: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(num_tokens, HIDDEN)


# Per op one call for the schema, one for the fake and twice an eager and a traced one; the traced combine_out returns
# nothing and writes to clones of its arguments, so there it is rightly dropped. One dispatch makes the routing.
ROUNDS = 6 + 6 + 4 + 1
exactly = torch.testing.assert_close


def equal_by_contract(actual: Any, expected: Any, **_: Any) -> None:
    """What two calls with equal arguments have in common: everything but the payload of rows that hold no token, and
    row 0 of routing, the number of the round."""
    if isinstance(actual, torch.Tensor) or actual is None:
        exactly(actual, expected, rtol=0, atol=0)
        return
    assert len(actual) == len(expected) == 6
    *rows, stats, routing = actual
    *expected_rows, expected_stats, expected_routing = expected
    exactly(rows[1], expected_rows[1], rtol=0, atol=0)
    holds_token = (expected_rows[1] >= 0).any(1)
    for mine, theirs in zip(rows, expected_rows, strict=True):
        assert mine.shape == theirs.shape
        exactly(*(t[holds_token] if t.numel() else t for t in (mine, theirs)), rtol=0, atol=0)
    exactly(stats, expected_stats, rtol=0, atol=0)
    exactly(routing[1:], expected_routing[1:], rtol=0, atol=0)


def check_ops(rank: int, world_size: int, device: torch.device, name: str) -> int:
    """opcheck on the three ops of a case. The utilities call an op several times, equally often on every rank. Returns
    the number of rounds."""
    group = open_roomy_group(rank, world_size, device.type)
    try:
        args, options = dispatch_arguments(CASES[name], group.order, group.comm, world_size, rank)
        # The utilities compare an eager call with a traced one by torch.testing.assert_close.
        with mock.patch.object(torch.testing, "assert_close", equal_by_contract):
            torch.library.opcheck(ops.dispatch.default, args, options, test_utils=UTILITIES)
            routing = ops.dispatch(*args, **options)[5]
            combine_args, combine_options = combine_arguments(args, options, routing)
            torch.library.opcheck(ops.combine.default, combine_args, combine_options, test_utils=UTILITIES)
            out = out_of(args[0].shape[0], combine_args[0])
            torch.library.opcheck(
                ops.combine_out.default, combine_args, combine_options | {"out": out}, test_utils=UTILITIES
            )
        return group.describe()["rounds"]
    finally:
        group.destroy()


def check_ops_in_pool(rank: Rank, name: str) -> int:
    return check_ops(rank.rank, rank.world_size, rank.device, name)


@pytest.mark.parametrize("name", CASES)
def test_opcheck_on_one_rank(device: str, name: str) -> None:
    assert check_ops(0, 1, torch.device(device), name) == ROUNDS


@pytest.mark.parametrize("name", CASES)
def test_opcheck_on_two_ranks(ranks: Callable[[int], RankPool], name: str) -> None:
    assert ranks(2).run(check_ops_in_pool, name) == [ROUNDS] * 2


def test_equality_by_contract_sees_a_wrong_row(device: str) -> None:
    group = open_roomy_group(0, 1, device)
    args, options = dispatch_arguments(CASES["everything"], group.order, group.comm, 1)
    first, second = (ops.dispatch(*args, **options) for _ in range(2))
    equal_by_contract(first, second)
    for index in range(6):
        wrong = [t.clone() for t in second]
        wrong[index].view(-1)[-1 if index == 5 else 0] += 1
        with pytest.raises(AssertionError):
            equal_by_contract(first, wrong)
    group.destroy()


@pytest.mark.parametrize("name", ["dispatch", "combine", "combine_out"])
def test_tags(name: str) -> None:
    tags = getattr(ops, name).default.tags
    assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(tags)


def to_meta(arguments: Any) -> Any:
    # The mask stays: it is read on the host.
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t if t.dtype == torch.uint64 else t.to("meta"), arguments
    )


def layout(outputs: Any) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    return [(t.shape, t.stride(), t.dtype) for t in ([outputs] if isinstance(outputs, torch.Tensor) else outputs)]


@pytest.mark.parametrize("name", CASES)
def test_meta_has_the_shapes_and_strides_of_the_real_ops(device: str, name: str) -> None:
    group = open_roomy_group(0, 1, device)
    args, options = dispatch_arguments(CASES[name], group.order, group.comm, 1)
    real = ops.dispatch(*args, **options)
    combine_args, combine_options = combine_arguments(args, options, real[5])
    real_combined = ops.combine(*combine_args, **combine_options)
    rounds = group.describe()["rounds"]
    group.destroy()

    meta = ops.dispatch(*to_meta(args), **to_meta(options) | {"comm": "nobody"})
    assert all(t.is_meta for t in meta)
    assert layout(meta) == layout(real)
    meta_args, meta_options = to_meta(combine_args), combine_options | {"comm": "nobody"}
    assert layout(ops.combine(*meta_args, **meta_options)) == layout(real_combined)
    out = out_of(args[0].shape[0], meta_args[0])
    assert ops.combine_out(*meta_args, **meta_options, out=out) is None
    assert rounds == 2


@pytest.mark.parametrize("world_size", [1, 3, 64])
def test_meta_knows_every_size_from_the_arguments(world_size: int) -> None:
    args, options = dispatch_arguments(CASES["everything"], torch.empty(1), "nobody", 1)
    options |= {"ep_size": world_size, "active_rank_mask": None}
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden, ids, weights, scale, stats, routing = ops.dispatch(*args, **options)
    rows = world_size * 7
    assert [tuple(t.shape) for t in (hidden, ids, weights, scale, stats, routing)] == [
        (rows, HIDDEN),
        (rows, TOP_K),
        (rows, TOP_K),
        (rows, 3),
        (world_size, 3),
        (1 + world_size + min(TOP_K, world_size), 7),
    ]
    assert [t.dtype for t in (hidden, ids, weights, scale, stats, routing)] == [
        torch.float32, torch.int32, torch.float32, torch.uint8, torch.int32, torch.int32,
    ]  # fmt: skip


def test_meta_and_the_real_ops_refuse_alike(device: str) -> None:
    """A check exists once: the Meta column and the real one say the same, word for word."""
    group = open_roomy_group(0, 1, device)
    (hidden, ids, _, _, order), options = dispatch_arguments(CASES["plain"], group.order, group.comm, 1)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((hidden, ids[:-1], None, None, order), options),
        ((hidden, ids.float(), None, None, order), options),
        ((hidden, ids, ids[:, :1].float(), None, order), options),
        ((hidden, ids, None, hidden[:2], order), options),
        ((hidden, ids, None, None, hidden), options),
        ((hidden, ids, None, None, order), options | {"tokens_per_rank": 4}),
        ((hidden, ids, None, None, order), options | {"timeout_sec": 0}),
        ((hidden, ids, None, None, order), options | {"invalid_expert_id": 0}),
    ]
    for args, kwargs in wrong:
        texts = []
        for a, k in ((args, kwargs), (to_meta(args), to_meta(kwargs))):
            with pytest.raises((ValueError, TypeError)) as error:
                ops.dispatch(*a, **k)
            texts.append(str(error.value).splitlines()[0])
        assert texts[0] == texts[1] and texts[0].startswith("dispatch: ")
    assert group.describe()["rounds"] == 0
    group.destroy()
