"""Steps of two ops, start and wait: cases, the protocol between the two, misuse, gradients, compiled code, the layer.

The Steps of cases.py compare every bit; what they are given as ``between`` runs between a start and its wait.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import BY_NAME, CASES, Case, Step, group_for, make_group, roomy_group
from ranks import Rank, RankPool
from test_ops import CASES as OP_CASES
from test_ops import combine_arguments, dispatch_arguments, equal_by_contract, layout, open_roomy_group, to_meta
from test_protocol import EXCHANGE, HOLD_UP, LOCAL, POINTS, run_random_rounds, script
from test_rows import run_or_be_refused
from tiny_model import CAPACITY, EXPERTS, HIDDEN, PATIENCE, TOP_K, open_group, tokens
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.schema_check_mode import SchemaCheckMode

import torch_moe_ep
from torch_moe_ep import (
    _C,
    GroupedSwiGLUConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpLayer,
    MoEEpTensors,
    MoEWeightPack,
    QuantFormat,
    SplitConfig,
)

ops = torch.ops.moe_ep


def nothing() -> None:
    pass


# --- Every case -----------------------------------------------------------------------------------------------------


def run_case(rank: Rank, name: str, backend: str) -> None:
    case, w = BY_NAME[name], rank.world_size
    group = make_group(case, w, rank.rank, rank.device, backend=backend)
    try:
        for seed in range(4):  # one op and two in turns, on the same windows
            step = Step(case, w, rank.rank, seed, rank.device, between=None if seed == 1 else nothing)
            step.dispatch(group)
            if seed == 2:
                step.between = None
            step.combine(group)
            if seed == 3:
                step.combine(group)
    finally:
        group.destroy()


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_case(ranks: Callable[[int], RankPool], name: str, ep_size: int, backend: str) -> None:
    run_or_be_refused(ranks(ep_size), run_case, name, backend)


# --- Between a start and its wait -----------------------------------------------------------------------------------


def run_script(rank: Rank, order: str, case: Case, slow: int, point: str) -> None:
    """``order`` as in test_protocol.py; rank ``slow`` computes between starts and waits, or is held up at a point."""
    w = rank.world_size
    group = make_group(case, w, rank.rank, rank.device)

    def between() -> None:
        if rank.rank == slow and point == "between":
            time.sleep(HOLD_UP / 1e6)

    try:
        if rank.rank == slow and point != "between":
            _C.set_delay(group.comm, point, HOLD_UP)
        count = order.count("D")
        steps = [Step(case, w, rank.rank, i, rank.device, between=between) for i in range(count)]
        for letter, i, _ in script(order, [case] * count):
            if letter == "D":
                steps[i].dispatch(group)
            else:
                steps[i].combine(group)
    finally:
        group.destroy()


@pytest.mark.parametrize("point", ["between", *POINTS])
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("order", ["D D", "D C D", "D D C C", "D D D C C C"])
@pytest.mark.parametrize("ep_size", [2, 3])
def test_one_slow_rank(ranks: Callable[[int], RankPool], order: str, slow: int, point: str, ep_size: int) -> None:
    """Among them the examples of fence.h: dispatch, combine, dispatch and dispatch, dispatch, with rank 1 computing
    between its start and its wait."""
    ranks(ep_size).run(run_script, order, EXCHANGE, slow, point)


def run_ahead(rank: Rank) -> list[str]:
    """The example of fence.h with every step of rank 0 seen: what it has done while rank 1 computes."""
    group = make_group(EXCHANGE, 2, rank.rank, rank.device)
    seen: list[str] = []
    first, second = (Step(EXCHANGE, 2, rank.rank, seed, rank.device, between=nothing) for seed in range(2))
    try:
        if rank.rank == 1:
            first.between = lambda: time.sleep(0.3)
            begin = time.monotonic()
            first.dispatch(group)
            seen.append("late" if time.monotonic() - begin > 0.29 else "early")
        else:
            begin = time.monotonic()
            first.dispatch(group)
            # Back after rank 1's start, long before its wait; and a start of another kind does not wait for it either.
            pending = torch_moe_ep.combine_start(
                group_for(EXCHANGE, group), first.expert_output.to(rank.device), first.routing,
                num_tokens=len(first.inputs.topk_ids),
            )
            seen.append("ahead" if time.monotonic() - begin < 0.2 else "held back")
            out = torch_moe_ep.combine_wait(pending)
            seen.append("held back" if time.monotonic() - begin > 0.2 else "ahead")
            assert torch.equal(out.cpu(), first.expected_out)
        if rank.rank == 1:
            first.combine(group)
        second.dispatch(group)
        second.combine(group)
    finally:
        group.destroy()
    return seen


def test_a_peer_runs_ahead_by_one_round() -> None:
    with RankPool(2) as pool:
        assert pool.run(run_ahead) == [["ahead", "held back"], ["late"]]


@pytest.mark.parametrize("ep_size", [2, 3, 4])
def test_random_rounds(ranks: Callable[[int], RankPool], ep_size: int) -> None:
    ranks(ep_size).run(run_random_rounds, 21 + ep_size, 200, True)


def run_without_data_dependency(rank: Rank) -> None:
    """All tokens stay local in most steps: the protocol alone holds the fast rank back."""
    w = rank.world_size
    group = make_group(EXCHANGE, w, rank.rank, rank.device)

    def between() -> None:
        if rank.rank == 1:
            time.sleep(0.002)

    try:
        for n in range(20):
            step = Step(EXCHANGE if n % 3 == 2 else LOCAL, w, rank.rank, n, rank.device, between=between)
            step.dispatch(group)
            if n % 2:
                step.dispatch(group)
            step.combine(group)
    finally:
        group.destroy()


def test_rounds_without_data_dependency(ranks: Callable[[int], RankPool]) -> None:
    ranks(3).run(run_without_data_dependency)


def run_mask_of_the_start(rank: Rank) -> None:
    """The ranks of a step are those of its start, whatever set_active_ranks says in between."""
    case = replace(BY_NAME["masked_rank"], eplb=None)
    group: Any = roomy_group(rank.world_size, rank.rank, rank.device)
    step = Step(case, rank.world_size, rank.rank, 0, rank.device)
    active = case.active(rank.world_size)
    step.mask = None  # that of the communicator instead, changed while the steps are under way
    step.between = lambda: group.set_active_ranks(range(rank.world_size))
    for op in (step.dispatch, step.combine):
        group.set_active_ranks(active)
        op(group)
    group.destroy()


def test_the_mask_is_that_of_the_start(ranks: Callable[[int], RankPool]) -> None:
    ranks(3).run(run_mask_of_the_start)


# --- Misuse ---------------------------------------------------------------------------------------------------------


def told(device: torch.device, kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """On the CPU the call raises; on a GPU the kernel leaves a record, and the next call raises."""
    if device.type == "cuda":
        call()
        torch.cuda.synchronize()
        kind = RuntimeError
    with pytest.raises(kind, match=text):
        call()


class Calls:
    """The ops of a step on a group, as functions of nothing (or of a start's token)."""

    def __init__(self, group: MoEEpCommunication, step: Step) -> None:
        assert step.routing is not None
        inputs, device = step.inputs, step.device
        rows = step.expert_output.to(device)
        assert inputs.topk_weights is not None
        options = {"tokens_per_rank": step.tokens_per_rank}
        args = (group, inputs.hidden_states.to(device), inputs.topk_ids.to(device), inputs.topk_weights.to(device))
        combine_args = (group, rows, step.routing)
        combine_options = {"num_tokens": len(inputs.topk_ids)}
        self.dispatch = lambda: torch_moe_ep.dispatch(*args, **options)
        self.dispatch_start = lambda: torch_moe_ep.dispatch_start(*args, **options)
        self.combine = lambda: torch_moe_ep.combine(*combine_args, **combine_options)
        self.combine_start = lambda: torch_moe_ep.combine_start(*combine_args, **combine_options)
        out = torch.empty_like(rows[: len(inputs.topk_ids)])
        self.combine_out = lambda: torch_moe_ep.combine(*combine_args, **combine_options, out=out)
        comm = {"comm": group.comm, "ep_size": group.ep_size}
        self.combine_wait = lambda token: ops.combine_wait(
            rows, step.routing, token, None, group.order, **combine_options, **comm
        )
        self.dispatch_wait = lambda token: ops.dispatch_wait(
            *args[1:], None, token, None, group.order, **options, num_experts=group.params.num_experts, **comm
        )


def run_misuse(rank: Rank) -> None:
    device = rank.device
    group = make_group(EXCHANGE, rank.world_size, rank.rank, device, timeout_sec=5)
    step = Step(EXCHANGE, rank.world_size, rank.rank, 0, device)
    try:
        step.dispatch(group)
        calls = Calls(group, step)
        refused = ValueError
        for made, done, text in (
            (calls.dispatch_start, torch_moe_ep.dispatch_wait, "dispatch"),
            (calls.combine_start, torch_moe_ep.combine_wait, "combine"),
        ):
            pending = made()
            between = rf"is between {text}_start \(round \d+\) and its {text}_wait; issue that first"
            told(device, refused, "^dispatch: communicator '.*' " + between, calls.dispatch)
            told(device, refused, "^combine: communicator '.*' " + between, calls.combine)
            told(device, refused, "^combine: communicator '.*' " + between, calls.combine_out)
            told(device, refused, "^dispatch_start: communicator '.*' " + between, calls.dispatch_start)
            told(device, refused, "^combine_start: communicator '.*' " + between, calls.combine_start)
            wait_other = calls.combine_wait if text == "dispatch" else calls.dispatch_wait
            told(device, refused, rf"^\w+_wait: communicator '.*' {between}", lambda: wait_other(pending.token))  # noqa: B023
            stale = pending._replace(token=pending.token - 1)
            told(device, refused, rf"^{text}_wait: pending: expected that of the last {text}_start \(round \d+\), got "
                 r"that of round \d+", lambda: done(stale))  # noqa: B023
            done(pending)
            told(device, refused, rf"^{text}_wait: communicator '.*' has nothing to wait for; issue {text}_start first",
                 lambda: done(pending))  # noqa: B023
        # As good as new: nothing was sent, no round was lost.
        assert group.describe()["rounds"] == 3
        for seed in range(3):
            step = Step(EXCHANGE, rank.world_size, rank.rank, seed, device, between=nothing if seed else None)
            step.dispatch(group)
            step.combine(group)
    finally:
        group.destroy()


@pytest.mark.parametrize("ep_size", [1, 2, 3])
def test_misuse_is_told_and_costs_nothing(ranks: Callable[[int], RankPool], ep_size: int) -> None:
    ranks(ep_size).run(run_misuse)


def run_other_arguments(rank: Rank) -> None:
    group = make_group(EXCHANGE, rank.world_size, rank.rank, rank.device)
    step = Step(EXCHANGE, rank.world_size, rank.rank, 0, rank.device)
    step.dispatch(group)
    calls = Calls(group, step)
    pending = calls.dispatch_start()
    for change, text in (
        ({"topk_weights": None}, "the bytes of a row of topk_weights .*: expected 16 as in dispatch_start, got 0"),
        ({"hidden_states": pending.args.hidden_states[:, :8]}, "the bytes of a hidden row: expected 64 .*, got 32"),
        ({"hidden_states": pending.args.hidden_states[:7], "topk_ids": pending.args.topk_ids[:7],
          "topk_weights": pending.args.topk_weights[:7]}, "the number of tokens: expected 8 .*, got 7; pass both"),
        ({"options": pending.args.options._replace(num_experts=9)}, "num_experts: expected 8 as in .*, got 9"),
    ):
        spoilt = pending._replace(args=pending.args._replace(**change))
        with pytest.raises(ValueError, match="^dispatch_wait: " + text):
            torch_moe_ep.dispatch_wait(spoilt)
    torch_moe_ep.dispatch_wait(pending)
    with pytest.raises(TypeError, match="combine_wait: pending: expected what combine_start returned, got Pending"):
        torch_moe_ep.combine_wait(pending)
    with pytest.raises(TypeError, match="dispatch_wait: pending: expected what dispatch_start returned, got int"):
        torch_moe_ep.dispatch_wait(1)  # type: ignore[arg-type]
    group.destroy()


def test_a_wait_with_other_arguments() -> None:
    """On the CPU, where the start is remembered. A GPU compares a wait with what the peers say."""
    with RankPool(2) as pool:
        pool.run(run_other_arguments)


def test_bad_pending_tensors(device: str) -> None:
    group = open_roomy_group(0, 1, device)
    args, options = dispatch_arguments(OP_CASES["plain"], group.order, group.comm, 1)
    pending = ops.dispatch_start(*args, **options)
    for spoilt, kind, text in (
        (pending.int(), TypeError, "pending: expected the int64 tensor of the start, got Int"),
        (pending[0], ValueError, "pending: expected 1 dimension, got 0"),
        (pending.expand(2), ValueError, "pending: expected 1 element, got 2"),
    ):
        for where in (lambda t: t, to_meta):
            with pytest.raises(kind, match="^dispatch_wait: " + text):
                ops.dispatch_wait(*where(args[:4]), where(spoilt), None, where(args[4]), **options)
    with pytest.raises(ValueError, match="^dispatch_start: topk_ids: expected"):
        ops.dispatch_start(args[0], args[1][:1], *args[2:], **options)
    with pytest.raises(ValueError, match="^dispatch_start: tokens_per_rank: communicator .* has room for"):
        ops.dispatch_start(*args, **options | {"tokens_per_rank": CAPACITY + 1})
    with pytest.raises(ValueError, match="^dispatch_wait: communicator '.*' has ep_size 1"):
        ops.dispatch_wait(*args[:4], pending, None, args[4], **options | {"ep_size": 2})
    ops.dispatch_wait(*args[:4], pending, None, args[4], **options)
    group.destroy()


def run_two_forms(rank: Rank) -> list[str]:
    group = make_group(EXCHANGE, rank.world_size, rank.rank, rank.device, timeout_sec=5)
    step = Step(EXCHANGE, rank.world_size, rank.rank, 0, rank.device)
    step.dispatch(group)
    calls = Calls(group, step)
    texts = []
    for one, start, wait in (
        (calls.dispatch, calls.dispatch_start, torch_moe_ep.dispatch_wait),
        (calls.combine, calls.combine_start, torch_moe_ep.combine_wait),
    ):
        with pytest.raises(RuntimeError, match="disagree") as error:
            if rank.rank == 0:
                one()
            else:
                wait(start())
            if rank.device.type == "cuda":
                torch.cuda.synchronize()
                one()  # raises before it launches
        texts.append(str(error.value))
    step.between = nothing
    step.dispatch(group)
    step.combine(group)
    group.destroy()
    return texts


def test_ranks_that_differ_in_form_are_told(ranks: Callable[[int], RankPool]) -> None:
    """Over every transport: one that takes small steps of one op would wait for what another does not send."""
    for texts in ranks(2).run(run_two_forms):
        for text in texts:
            assert "ranks disagree about the form of the step (1 op, or 2: a start and its wait)" in text


def run_lonely_wait(rank: Rank) -> tuple[str, str, float]:
    group = make_group(EXCHANGE, 2, rank.rank, rank.device, timeout_sec=1)
    step = Step(EXCHANGE, 2, rank.rank, 0, rank.device, between=lambda: time.sleep(1.5))
    step.dispatch(group)  # the deadline of a wait begins with the wait
    assert step.routing is not None
    text, again, waited = "", "", 0.0
    if rank.rank == 0:
        calls = Calls(group, step)
        pending = calls.combine_start()
        begin = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            torch_moe_ep.combine_wait(pending)
        text, waited = str(error.value), time.monotonic() - begin
        with pytest.raises(RuntimeError) as error:
            torch_moe_ep.combine_wait(pending)
        again = str(error.value)
    group.destroy()
    return text, again, waited


def test_deadline_of_a_wait() -> None:
    with RankPool(2) as pool:
        text, again, waited = pool.run(run_lonely_wait)[0]
    assert re.match(r"combine round 2 on rank 0 .* waited 1 s \(timeout_sec\) for rank 1: no flag came", text)
    assert "cannot be used again after: combine round 2" in again
    assert 0.9 < waited < 5


def run_second_thread(rank: Rank) -> str:
    """While a rank waits, another thread of it is told that the communicator is in use."""
    group = make_group(EXCHANGE, 2, rank.rank, rank.device)
    step = Step(EXCHANGE, 2, rank.rank, 0, rank.device)
    step.dispatch(group)
    calls = Calls(group, step)
    text = ""
    if rank.rank == 1:
        dist.barrier()
        torch_moe_ep.combine_wait(calls.combine_start())
    else:
        pending = calls.combine_start()
        waiting = threading.Thread(target=torch_moe_ep.combine_wait, args=(pending,))
        waiting.start()
        time.sleep(1)
        with pytest.raises(ValueError) as error:
            torch_moe_ep.combine_wait(pending)
        text = str(error.value)
        dist.barrier()
        waiting.join()
    group.destroy()
    return text


def test_a_second_thread_is_refused() -> None:
    with RankPool(2) as pool:
        text = pool.run(run_second_thread)[0]
    assert re.match("combine_wait: communicator '.*' is in use by another thread", text)


# --- What PyTorch knows of the ops ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OP_CASES)
def test_meta_and_schema(device: str, name: str) -> None:
    """Shapes and strides of the Meta column are those of the real ops, and nothing but `order` is declared to change.
    (opcheck calls an op alone, several times; these come in pairs.)"""
    group = open_roomy_group(0, 1, device)
    args, options = dispatch_arguments(OP_CASES[name], group.order, group.comm, 1)
    one = ops.dispatch(*args, **options)
    with SchemaCheckMode():
        pending = ops.dispatch_start(*args, **options)
        two = ops.dispatch_wait(*args[:4], pending, None, args[4], **options)
        combine_args, combine_options = combine_arguments(args, options, two[5])
        combining = ops.combine_start(*combine_args, **combine_options)
        out = ops.combine_wait(*combine_args[:2], combining, None, combine_args[2], **combine_options)
    equal_by_contract(two, one)
    assert layout(two) == layout(one) and pending.dtype == torch.int64 and pending.shape == (1,)
    assert (int(pending), int(two[5].flatten()[0]), int(combining)) == (2, 2, 3)
    assert torch.equal(out, ops.combine(*combine_args, **combine_options))
    meta, nobody = to_meta(args), to_meta(options) | {"comm": "nobody"}
    meta_pending = ops.dispatch_start(*meta, **nobody)
    assert layout(meta_pending) == layout(pending)
    assert layout(ops.dispatch_wait(*meta[:4], meta_pending, None, meta[4], **nobody)) == layout(two)
    meta, nobody = to_meta(combine_args), combine_options | {"comm": "nobody"}
    meta_pending = ops.combine_start(*meta, **nobody)
    assert layout(meta_pending) == layout(combining)
    assert layout(ops.combine_wait(*meta[:2], meta_pending, None, meta[2], **nobody)) == layout(out)
    group.destroy()


def test_pending_is_a_pytree(device: str) -> None:
    group = open_group(0, 1, device)
    x = tokens(5, device=device)
    pending = torch_moe_ep.dispatch_start(group, x, torch.zeros(5, 2, dtype=torch.int64, device=device))
    leaves, spec = torch.utils._pytree.tree_flatten(pending)
    assert all(leaf is None or isinstance(leaf, torch.Tensor | int | str) for leaf in leaves)
    assert any(leaf is x for leaf in leaves)
    rows = torch_moe_ep.dispatch_wait(torch.utils._pytree.tree_unflatten(leaves, spec))
    assert torch.equal(rows.hidden_states[:5], x)
    group.destroy()


# --- Gradients ------------------------------------------------------------------------------------------------------


def step_of_model(
    group: MoEEpCommunication, phases: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: torch.Tensor,
    shared: torch.Tensor,
) -> torch.Tensor:
    if phases == 1:
        rows = torch_moe_ep.dispatch(group, x, ids, weights)
        extra = torch.tanh(x @ shared)
    else:
        pending = torch_moe_ep.dispatch_start(group, x, ids, weights)
        extra = torch.tanh(x @ shared)
        rows = torch_moe_ep.dispatch_wait(pending, extra)
    holds = (rows.topk_ids >= 0).any(1, keepdim=True)
    assert rows.topk_weights is not None
    y = torch.where(holds, rows.hidden_states, 0) @ w * torch.where(holds, rows.topk_weights, 0).sum(1, keepdim=True)
    if phases == 1:
        out = torch_moe_ep.combine(group, y, rows.routing, num_tokens=x.shape[0])
    else:
        combining = torch_moe_ep.combine_start(group, y, rows.routing, num_tokens=x.shape[0])
        extra = extra * 2
        out = torch_moe_ep.combine_wait(combining, extra)
    return out + (extra if phases == 2 else extra * 2)


def run_gradients(rank: Rank, backend: str, compiled: bool) -> None:
    torch._dynamo.reset()
    group = open_group(rank.rank, rank.world_size, rank.device.type, backend=backend)
    function = torch.compile(step_of_model, fullgraph=True, dynamic=True) if compiled else step_of_model
    g = torch.Generator().manual_seed(rank.rank)
    w, shared = torch.eye(HIDDEN) / 2, torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(7))
    # Compiled for 0 or 1 tokens, backward orders its collectives in a way of its own; one-sided ops have their order.
    for count in (5, 9) if compiled and backend == "torch_distributed" else (5, 0, 9):
        x = tokens(count + rank.rank, rank.rank)
        weights, ids = torch.rand(len(x), EXPERTS, generator=g).topk(TOP_K)
        ids[1:2] = -1
        results = []
        for run, phases in ((step_of_model, 1), (function, 2)):
            leaves = [t.detach().to(rank.device).requires_grad_() for t in (x, weights, w, shared)]
            out = run(group, phases, leaves[0], ids.to(rank.device), *leaves[1:])
            out.square().sum().backward()
            results.append([out, *(leaf.grad for leaf in leaves)])
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(two, one, **({} if compiled else {"rtol": 0, "atol": 0}))
        assert (results[0][1] != 0).any() or not len(x)
    group.destroy()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_gradients_are_those_of_one_op(
    ranks: Callable[[int], RankPool], ep_size: int, compiled: bool, backend: str
) -> None:
    ranks(ep_size).run(run_gradients, backend, compiled, timeout=PATIENCE)


# --- The layer and compiled code ------------------------------------------------------------------------------------

SHARED_INNER = 24


class SharedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(5)
        self.up = nn.Parameter(torch.randn(HIDDEN, SHARED_INNER, generator=g) / 4)
        self.down = nn.Parameter(torch.randn(SHARED_INNER, HIDDEN, generator=g) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x @ self.up) @ self.down


def make_layer(group: MoEEpCommunication, **options: Any) -> MoEEpLayer:
    g = torch.Generator().manual_seed(3)
    w13, w2 = torch.randn(EXPERTS, 16, HIDDEN, generator=g) / 4, torch.randn(EXPERTS, HIDDEN, 8, generator=g) / 4
    local = slice(group.local_experts.start, group.local_experts.stop)
    pack = MoEWeightPack(w13[local].to(group.order.device), w2[local].to(group.order.device))
    layer = MoEEpLayer(weights=pack, group=group, backend=SplitConfig(kernel=GroupedSwiGLUConfig()), **options)
    return layer.to(group.order.device)


def some_tensors(rank: int, count: int, device: torch.device | str) -> MoEEpTensors:
    x = tokens(count, rank, device=device)
    g = torch.Generator().manual_seed(50 + rank)
    weights, ids = torch.rand(count, EXPERTS, generator=g).topk(TOP_K)
    return MoEEpTensors(x, ids.to(device), weights.to(device))


def run_layers(rank: Rank, compiled: bool, backend: str) -> None:
    torch._dynamo.reset()
    group = open_group(rank.rank, rank.world_size, rank.device.type, backend=backend)
    shared = SharedExperts().to(rank.device)
    plain = make_layer(group)
    for overlap in ("dispatch", "combine", None):
        layer = make_layer(group, shared_experts=shared, overlap=overlap)
        assert set(layer.state_dict()) > {"shared_experts.up", "shared_experts.down"}
        run = torch.compile(layer, fullgraph=True, dynamic=True) if compiled else layer
        for count in (6 - rank.rank, 9):
            tensors = some_tensors(rank.rank, count, rank.device)
            tensors.hidden_states.requires_grad_()
            grads = []
            for function in (lambda t: plain(t) + shared(t.hidden_states), run):
                layer.zero_grad(), plain.zero_grad()
                tensors.hidden_states.grad = None
                out = function(tensors)
                out.square().sum().backward()
                grads.append([out.detach(), tensors.hidden_states.grad, shared.up.grad.clone()])
            for mine, expected in zip(grads[1], grads[0], strict=True):
                torch.testing.assert_close(mine, expected)
    group.destroy()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_layer_with_shared_experts(
    ranks: Callable[[int], RankPool], ep_size: int, compiled: bool, backend: str
) -> None:
    ranks(ep_size).run(run_layers, compiled, backend, timeout=PATIENCE)


def run_quantized_layer(rank: Rank) -> None:
    params = MoEEpCommParams(EXPERTS, TOP_K, CAPACITY, HIDDEN, torch.float32, QuantFormat.FP8PerTensor)
    bootstrap = torch_moe_ep.BootstrapConfig(rank.world_size, rank.rank)
    group = torch_moe_ep.layer.make_group(bootstrap, params, None, rank.device)
    scale = torch.tensor(0.02, device=rank.device)
    shared = SharedExperts().to(rank.device)
    plain = make_layer(group, global_scale=scale)
    tensors = some_tensors(rank.rank, 6, rank.device)
    with torch.no_grad():
        expected = plain(tensors) + shared(tensors.hidden_states)
        for overlap in ("dispatch", "combine", None):
            layer = make_layer(group, shared_experts=shared, overlap=overlap, global_scale=scale)
            torch.testing.assert_close(layer(tensors), expected)
        values, _ = torch_moe_ep.quantize(tensors.hidden_states, QuantFormat.FP8PerTensor, global_scale=scale)
        with pytest.raises(ValueError, match="hidden_states: expected unquantized tokens, for the shared_experts"):
            layer(replace(tensors, hidden_states=values))
    group.destroy()


def test_quantized_layer_with_shared_experts(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_quantized_layer)


def test_what_a_layer_refuses(device: str) -> None:
    group = open_group(0, 1, device)
    with pytest.raises(ValueError, match="overlap: expected 'dispatch', 'combine' or None, got 'both'"):
        make_layer(group, shared_experts=nn.Identity(), overlap="both")
    layer = make_layer(group, shared_experts=nn.Linear(HIDDEN, 1))
    with pytest.raises(ValueError, match=r"shared_experts: expected a result of shape \(5, 16\), got \(5, 1\)"):
        layer(some_tensors(0, 5, device))
    group.destroy()


@pytest.fixture(autouse=True)
def _clean_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def calls_in(code: str) -> list[str]:
    """In order of the generated wrapper: our ops, and "shared" for each product of the shared experts."""
    found = []
    for line in code.splitlines():
        op = re.search(r"torch\.ops\.moe_ep\.(\w+)\.default\(", line)
        if op:
            found.append(op[1])
        elif re.search(r"extern_kernels\.(mm|addmm)\(", line):  # the other experts are grouped
            found.append("shared")
    return found


PLACES = {
    "dispatch": ["dispatch_start", "shared", "shared", "dispatch_wait", "combine"],
    "combine": ["dispatch", "combine_start", "shared", "shared", "combine_wait"],
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("overlap", PLACES)
def test_shared_experts_lie_between_start_and_wait_in_compiled_code(device: str, overlap: str, training: bool) -> None:
    group = open_group(0, 1, device)
    layers = nn.ModuleList(make_layer(group, shared_experts=SharedExperts(), overlap=overlap) for _ in range(2))

    def model(tensors: MoEEpTensors) -> torch.Tensor:
        x = tensors.hidden_states
        for layer in layers:
            x = x + layer(replace(tensors, hidden_states=x))
        return x

    tensors = some_tensors(0, 6, device)
    with fresh_cache(), torch.set_grad_enabled(training):
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        out, codes = run_and_get_code(compiled, tensors)
        torch.testing.assert_close(out, model(tensors))
    assert calls_in(codes[0]) == 2 * PLACES[overlap]
    group.destroy()


@pytest.mark.parametrize("overlap", PLACES)
def test_layer_with_shared_experts_exports(device: str, overlap: str) -> None:
    group = open_group(0, 1, device)
    layer = make_layer(group, shared_experts=SharedExperts(), overlap=overlap)
    with torch.no_grad():
        rows = torch.export.Dim("rows", max=CAPACITY)
        exported = torch.export.export(
            layer, (some_tensors(0, 6, device),), dynamic_shapes={"tensors": [{0: rows}] * 3}, strict=False
        )
        names = [str(node.target) for node in exported.graph.nodes if "moe_ep." in str(node.target)]
        assert [name.split(".")[1] for name in names] == [call for call in PLACES[overlap] if call != "shared"]
        for count in (6, 11):
            tensors = some_tensors(0, count, device)
            torch.testing.assert_close(exported.module()(tensors), layer(tensors))
    group.destroy()


def test_a_start_without_a_wait_is_not_dropped(device: str) -> None:
    """A graph that forgets the wait does not hide it: the next op is told."""
    group = open_group(0, 1, device)

    def forgets(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        torch_moe_ep.dispatch_start(group, x, ids)
        return x + 1

    x, ids = tokens(5, device=device), torch.zeros(5, 2, dtype=torch.int64, device=device)
    torch.compile(forgets, fullgraph=True)(x, ids)
    told(torch.device(device), ValueError, "is between dispatch_start", lambda: torch_moe_ep.dispatch(group, x, ids))
    group.destroy()


def test_why_a_wait_takes_what_comes_before_it(device: str) -> None:
    """Inductor computes where the result is used what nothing ties to another place."""
    group = open_group(0, 1, device)
    shared = SharedExperts().to(device)

    def step(x: torch.Tensor, ids: torch.Tensor, tied: bool) -> torch.Tensor:
        pending = torch_moe_ep.dispatch_start(group, x, ids)
        out = shared(x)
        rows = torch_moe_ep.dispatch_wait(pending, out if tied else None)
        return out + torch_moe_ep.combine(group, rows.hidden_states, rows.routing, num_tokens=x.shape[0])

    x, ids = tokens(5, device=device), torch.zeros(5, 2, dtype=torch.int64, device=device)
    seen = []
    for tied in (False, True):
        torch._dynamo.reset()
        with fresh_cache(), torch.no_grad():
            out, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), x, ids, tied)
            torch.testing.assert_close(out, step(x, ids, tied))
        seen.append(calls_in(code))
    assert seen == [["dispatch_start", "dispatch_wait", "combine", "shared", "shared"], PLACES["dispatch"]]
    group.destroy()
