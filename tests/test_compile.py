"""torch.compile: no graph breaks, few recompilations, the ops in program order, and eager's bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import expecttest
import pytest
import torch
from ranks import Rank, RankPool
from tiny_model import (
    CAPACITY,
    HIDDEN,
    PATIENCE,
    ClassLayer,
    Layer,
    make_model,
    make_reference,
    open_group,
    route,
    tokens,
)
from torch._dynamo.testing import CompileCounterWithBackend, normalize_gm
from torch._dynamo.utils import counters
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._inductor.utils import fresh_cache, run_and_get_code

import torch_moe_ep
from torch_moe_ep import MoEEpCommunication

LAYERS = {"functions": Layer, "classes": ClassLayer}


@pytest.fixture(autouse=True)
def _clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def some_routes(count: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states, ids and weights."""
    x = tokens(count, rank, device=device)
    return (x, *route(x, tokens(16, 99, device=device)[:, :6]))


# --- The ops alone: bit for bit, with Inductor ----------------------------------------------------------------------


def pair(
    group: MoEEpCommunication, through: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    if through == "functions":
        got = torch_moe_ep.dispatch(group, x, ids, weights)
        combined = torch_moe_ep.combine(group, got.hidden_states, got.routing, num_tokens=x.shape[0])
        return combined, got.topk_ids, got.topk_weights, got.hidden_states
    received = group.dispatch(x, ids, weights)
    return group.combine(received.hidden_states), received.topk_ids, received.topk_weights, received.hidden_states


def held(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Without the payload of rows that hold no token, which is unspecified."""
    combined, ids, *payload = outputs
    return combined, ids, *[rows[(ids >= 0).any(1)] for rows in payload]


def compare_pair(rank: Rank, through: str, dynamic: bool | None, backend: str) -> list[int]:
    torch._dynamo.reset()
    group = open_group(rank.rank, rank.world_size, rank.device.type, backend=backend)
    compiled = torch.compile(pair, fullgraph=True, dynamic=dynamic)
    for count in (5, 0, 1, 6, CAPACITY):
        inputs = some_routes((count + 3 * rank.rank) % (CAPACITY + 1), rank.rank, rank.device)
        for got, expected in zip(
            held(compiled(group, through, *inputs)), held(pair(group, through, *inputs)), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    breaks = list(counters["graph_break"])
    group.destroy()
    return breaks


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("through", LAYERS)
def test_ops_give_the_bits_of_eager(
    ranks: Callable[[int], RankPool], through: str, dynamic: bool | None, world_size: int, backend: str
) -> None:
    assert ranks(world_size).run(compare_pair, through, dynamic, backend, timeout=PATIENCE) == [[]] * world_size


# --- A model of several layers --------------------------------------------------------------------------------------


def compare_model(rank: Rank, through: str, backend: str) -> None:
    torch._dynamo.reset()
    groups = [
        open_group(rank.rank, rank.world_size, rank.device.type, namespace=name, backend=backend)
        for name in ("", "", "b")
    ]
    model = make_model(groups, layer=LAYERS[through])
    reference = make_reference(3, torch.float32, rank.device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for count in (5, 12):
            x = tokens(count + rank.rank, rank.rank, device=rank.device)
            got = compiled(x)
            torch.testing.assert_close(got, model(x))
            torch.testing.assert_close(got, reference(x))
    for group in groups:
        group.destroy()


@pytest.mark.parametrize("world_size", [2, 4])
def test_model_equals_eager_and_one_process(ranks: Callable[[int], RankPool], world_size: int, backend: str) -> None:
    ranks(world_size).run(compare_model, "functions", backend, timeout=PATIENCE)


def test_model_through_the_classes(ranks: Callable[[int], RankPool], backend: str) -> None:
    ranks(2).run(compare_model, "classes", backend, timeout=PATIENCE)


# --- Graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", LAYERS)
def test_graphs_for_every_number_of_tokens(device: str, through: str, backend: str) -> None:
    """One graph for 0 tokens, one for 1 and one for all others with dynamic=True; a single one where dimension 0 is
    unbacked; one per number without dynamic shapes; two where PyTorch finds out by itself (2, then 'dynamic')."""
    group = open_group(0, 1, device, backend=backend)
    model = make_model([group, group], layer=LAYERS[through])

    def count_graphs(dynamic: bool | None, counts: list[int], prepare: Callable[[torch.Tensor], None]) -> int:
        torch._dynamo.reset()
        backend = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
        with torch.no_grad():
            for count in counts:
                x = tokens(count, device=device)
                expected = model(x)
                prepare(x)
                torch.testing.assert_close(compiled(x), expected)
        return backend.frame_count

    every = list(range(CAPACITY + 1))
    graphs = {
        "dynamic": count_graphs(True, every, lambda x: None),
        "unbacked": count_graphs(None, every, lambda x: torch._dynamo.decorators.mark_unbacked(x, 0)),
        "static": count_graphs(False, [5, 5, 6, 7], lambda x: None),
        "automatic": count_graphs(None, [5, 5, 6, 7], lambda x: None),
    }
    assert graphs == {"dynamic": 3, "unbacked": 1, "static": 3, "automatic": 2}
    assert not counters["graph_break"]
    group.destroy()


@pytest.mark.parametrize("through", LAYERS)
def test_no_graph_break(device: str, through: str, backend: str) -> None:
    group = open_group(0, 1, device, backend=backend)
    explained = torch._dynamo.explain(make_model([group, group], layer=LAYERS[through]))(tokens(5, device=device))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    group.destroy()


def test_traced_graph(device: str) -> None:
    group = open_group(0, 1, device)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    class OnlyOps(torch.nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            got = torch_moe_ep.dispatch(group, x, ids)
            return torch_moe_ep.combine(group, got.hidden_states, got.routing, num_tokens=x.shape[0])

    x, ids, _ = some_routes(5, 0, torch.device(device))
    torch.compile(OnlyOps(), fullgraph=True, backend=keep)(x, ids)
    text = normalize_gm(graphs[0].print_readable(print_output=False)).replace(group.comm, "COMM").replace(", ", ",\n  ")
    group.destroy()
    expecttest.assert_expected_inline(
        text,
        """\
class GraphModule(torch.nn.Module):
    def forward(self,
  L_x_: "f32[5,
  16]",
  L_ids_: "i64[5,
  2]",
  L_group_order: "f32[1]"):
        l_x_ = L_x_
        l_ids_ = L_ids_
        l_group_order = L_group_order

        dispatch = torch.ops.moe_ep.dispatch(l_x_,
  l_ids_,
  None,
  None,
  l_group_order,
  tokens_per_rank = 64,
  num_experts = 6,
  ep_size = 1,
  invalid_expert_id = -1,
  eplb_local_stats = None,
  active_rank_mask = None,
  timeout_sec = 300,
  comm = 'COMM');  l_x_ = l_ids_ = None
        hidden: "f32[64,
  16]" = dispatch[0]
        routing: "i32[3,
  64]" = dispatch[5];  dispatch = None

        combine: "f32[5,
  16]" = torch.ops.moe_ep.combine(hidden,
  routing,
  l_group_order,
  num_tokens = 5,
  ep_size = 1,
  active_rank_mask = None,
  timeout_sec = 300,
  comm = 'COMM');  hidden = routing = l_group_order = None
        return (combine,)
""",
    )


# --- Order ----------------------------------------------------------------------------------------------------------


def interleaved(
    a: MoEEpCommunication, b: MoEEpCommunication, x: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """dispatch A, dispatch B, an unused dispatch and its equal, combine A, combine B; A is combined from B's sum."""
    t = x.shape[0]
    got_a, got_b = torch_moe_ep.dispatch(a, x, ids), torch_moe_ep.dispatch(b, x, ids)
    torch_moe_ep.dispatch(a, x, ids)
    torch_moe_ep.dispatch(a, x, ids)
    sum_a = torch_moe_ep.combine(a, got_a.hidden_states, got_a.routing, num_tokens=t)
    sum_b = torch_moe_ep.combine(b, got_b.hidden_states, got_b.routing, num_tokens=t)
    last = torch_moe_ep.dispatch(b, sum_a, ids)
    return sum_a, sum_b, got_a.routing, got_b.routing, last.routing, got_a.hidden_states, last.hidden_states


PROGRAM = ["dispatch a", "dispatch b", "dispatch a", "dispatch a", "combine a", "combine b", "dispatch b"]


def op_calls(code: str, a: str, b: str) -> list[str]:
    """The calls of our ops in generated code, in order."""
    names = {a: "a", b: "b"}
    calls = re.findall(r"torch\.ops\.moe_ep\.(dispatch|combine)\.default\(.*comm='([^']+)'", code)
    return [f"{op} {names[comm]}" for op, comm in calls]


def check_interleaved(rank: Rank, one_communicator: bool) -> tuple[list[str], list[list[int]], list[int]]:
    """The calls in Inductor's code; the round of each dispatch that is returned, eager and compiled; rounds in all."""
    torch._dynamo.reset()
    a = open_group(rank.rank, rank.world_size, rank.device.type)
    b = a if one_communicator else open_group(rank.rank, rank.world_size, rank.device.type, namespace="b")
    x, ids, _ = some_routes(6 - rank.rank, rank.rank, rank.device)
    with fresh_cache(), torch.no_grad():
        compiled = torch.compile(interleaved, fullgraph=True, dynamic=True)
        got, (code,) = run_and_get_code(compiled, a, b, x, ids)
        expected = interleaved(a, b, x, ids)
    dispatch_rounds = [[int(routing[0, 0]) for routing in outputs[2:5]] for outputs in (got, expected)]
    for mine, theirs in zip(got, expected, strict=True):
        if mine.dtype == torch.int32:  # routing, whose row 0 is the number of the round
            mine, theirs = mine[1:], theirs[1:]
        elif mine.shape[0] != x.shape[0]:
            holds_token = expected[2][1 : 1 + rank.world_size].flatten() >= 0
            mine, theirs = mine[holds_token], theirs[holds_token]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    rounds = [a.describe()["rounds"], b.describe()["rounds"]]
    for group in {a, b}:
        group.destroy()
    return op_calls(code, a.comm, b.comm), dispatch_rounds, rounds


def test_interleaved_steps_of_two_communicators_keep_their_order(ranks: Callable[[int], RankPool]) -> None:
    # Rounds of a: 1 2 3 dispatches, 4 combine. Of b: 1 dispatch, 2 combine, 3 dispatch. Then the same again in eager.
    assert ranks(2).run(check_interleaved, False, timeout=PATIENCE) == [(PROGRAM, [[1, 1, 3], [5, 4, 6]], [8, 6])] * 2


def test_interleaved_steps_of_one_communicator_keep_their_order(ranks: Callable[[int], RankPool]) -> None:
    program = [call[:-1] + "b" for call in PROGRAM]
    assert ranks(2).run(check_interleaved, True, timeout=PATIENCE) == [(program, [[1, 2, 7], [8, 9, 14]], [14, 14])] * 2


def test_order_survives_training(device: str) -> None:
    """Unused and equal dispatches are neither dropped nor merged where a backward graph is cut out as well."""
    group = open_group(0, 1, device)

    def step(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        torch_moe_ep.dispatch(group, x, ids)
        first, second = (torch_moe_ep.dispatch(group, x, ids) for _ in range(2))
        sums = [
            torch_moe_ep.combine(group, got.hidden_states @ w, got.routing, num_tokens=5) for got in (first, second)
        ]
        return torch.mm(*sums)

    x, ids, _ = some_routes(5, 0, torch.device(device))
    x, w = x[:, :5].contiguous(), torch.eye(5, device=device, requires_grad=True)
    rounds = []
    for run in (step, torch.compile(step, fullgraph=True, dynamic=False)):
        before = group.describe()["rounds"]
        product = run(x, ids, w)
        forward = group.describe()["rounds"]
        product.backward(torch.ones_like(product))
        rounds.append((forward - before, group.describe()["rounds"] - forward))
    assert rounds == [(5, 2)] * 2
    group.destroy()


# Why the schemas carry `order`: three twins of an op that differ in nothing else and note their calls. Torch 2.11 and
# 2.13 treat them alike.
_calls: list[int] = []
_twins = torch.library.Library("moe_ep_twin", "DEF")


def _define_twins() -> None:
    def record(x: torch.Tensor, number: int) -> torch.Tensor:
        _calls.append(number)
        return x.clone()

    for name in ("plain", "effect"):
        _twins.define(f"{name}(Tensor x, int number) -> Tensor")
        _twins.impl(name, record, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moe_ep_twin::{name}", lambda x, number: torch.empty_like(x), lib=_twins)
    _twins.define("argument(Tensor x, Tensor(a!) order, int number) -> Tensor")
    _twins.impl("argument", lambda x, order, number: record(x, number), "CompositeExplicitAutograd")
    torch.library.register_fake("moe_ep_twin::argument", lambda x, order, number: torch.empty_like(x), lib=_twins)
    _register_effectful_op(torch.ops.moe_ep_twin.effect.default, _EffectType.ORDERED)


_define_twins()


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        # (D0 D1 C0 C1 stays so, an unused call stays, equal calls stay two in training, the graph is cached)
        ("plain", (False, False, False, True)),
        ("effect", (True, True, True, False)),
        ("argument", (True, True, True, True)),
    ],
)
def test_why_the_ops_take_an_order_argument(device: str, kind: str, kept: tuple[bool, ...]) -> None:
    order = torch.zeros(1, device=device)

    def call(x: torch.Tensor, number: int) -> torch.Tensor:
        op = getattr(torch.ops.moe_ep_twin, kind)
        return op(x, order, number) if kind == "argument" else op(x, number)

    def dispatches_then_combines(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = call(x, 0), call(x, 1)
        return call(first, 2), call(second, 3)

    def unused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        call(x, 0)
        return call(x, 1)

    def equal(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call(x, 0) @ w, call(x, 0) @ w

    x, w = tokens(5, device=device), torch.eye(HIDDEN, device=device, requires_grad=True)
    program = {dispatches_then_combines: [0, 1, 2, 3], unused: [0, 1], equal: [0, 0]}
    observed = []
    for function, expected in program.items():
        torch._dynamo.reset()
        _calls.clear()
        with fresh_cache():
            torch.compile(function, fullgraph=True)(x, w)
        observed.append(_calls == expected)
    observed.append(counters["inductor"]["fxgraph_cache_bypass"] == 0)
    assert tuple(observed) == kept


# --- Memory ---------------------------------------------------------------------------------------------------------


def strides_seen(run: Callable[[], Any]) -> list[tuple[int, ...]]:
    """The strides of hidden_states and ids with which generated code calls dispatch."""
    packet, seen = torch.ops.moe_ep.dispatch, []
    real = packet.default

    def spy(hidden: torch.Tensor, ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.extend([hidden.stride(), ids.stride()])
        return real(hidden, ids, *args, **options)

    with mock.patch.object(packet, "default", spy):
        run()
    return seen


def test_the_ops_get_the_strides_of_eager(device: str) -> None:
    group = open_group(0, 1, device)

    def transposed(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        got = torch_moe_ep.dispatch(group, torch.mm(w, x).t(), ids.t())
        return torch_moe_ep.combine(group, got.hidden_states, got.routing, num_tokens=5)

    x, ids, _ = some_routes(5, 0, torch.device(device))
    args = (x.t().contiguous(), torch.eye(HIDDEN, device=device), ids.t().contiguous())
    with torch.no_grad():
        compiled = torch.compile(transposed, fullgraph=True)
        torch.testing.assert_close(compiled(*args), transposed(*args), rtol=0, atol=0)
        assert strides_seen(lambda: compiled(*args)) == [(1, 5), (1, 5)]
    group.destroy()


def early_output_read_late(
    group: MoEEpCommunication, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    early = torch_moe_ep.dispatch(group, x, ids)
    y = x
    for _ in range(3):
        got = torch_moe_ep.dispatch(group, y, ids)
        rows = torch.mm(got.hidden_states, w)  # Inductor is free to reuse the storage of got.hidden_states
        y = torch_moe_ep.combine(group, torch.mm(rows, w), got.routing, num_tokens=x.shape[0])
    return torch_moe_ep.combine(group, early.hidden_states, early.routing, num_tokens=x.shape[0]), y


def compare_early_output(rank: Rank) -> None:
    torch._dynamo.reset()
    group = open_group(rank.rank, rank.world_size, rank.device.type)
    x, ids, _ = some_routes(6, rank.rank, rank.device)
    args = (group, x, ids, torch.eye(HIDDEN, device=rank.device) / 2)
    with torch.no_grad():
        got = torch.compile(early_output_read_late, fullgraph=True, dynamic=True)(*args)
    for mine, theirs in zip(got, early_output_read_late(*args), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    group.destroy()


def test_an_early_output_outlives_later_steps(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(compare_early_output, timeout=PATIENCE)


def test_combine_into_a_given_tensor(device: str) -> None:
    # A contiguous one: Dynamo refuses an argument named `out` of other strides, whatever the op.
    group = open_group(0, 1, device)

    def into(x: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        got = torch_moe_ep.dispatch(group, x, ids)
        return torch_moe_ep.combine(group, got.hidden_states, got.routing, num_tokens=x.shape[0], out=out)

    x, ids, _ = some_routes(5, 0, torch.device(device))
    out, expected = torch.zeros_like(x), torch.zeros_like(x)
    returned = torch.compile(into, fullgraph=True, dynamic=True)(x, ids, out)
    into(x, ids, expected)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert returned.data_ptr() == out.data_ptr()
    group.destroy()


# --- Other ways to compile ------------------------------------------------------------------------------------------


def test_cpp_wrapper(device: str) -> None:
    group = open_group(0, 1, device)
    x, ids, weights = some_routes(5, 0, torch.device(device))
    options = {"cpp_wrapper": True}
    compiled = torch.compile(pair, fullgraph=True, dynamic=True, options=options)
    for got, expected in zip(
        held(compiled(group, "functions", x, ids, weights)),
        held(pair(group, "functions", x, ids, weights)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    group.destroy()


CACHED_PROGRAM = """
import sys, torch, torch_moe_ep
from torch._dynamo.utils import counters
from tiny_model import open_group, tokens
group = open_group(0, 1, sys.argv[1])
def f(x, ids):
    got = torch_moe_ep.dispatch(group, x, ids)
    return torch_moe_ep.combine(group, got.hidden_states, got.routing, num_tokens=x.shape[0])
x = tokens(5, device=sys.argv[1])
assert torch.equal(torch.compile(f, fullgraph=True, dynamic=True)(x, torch.zeros_like(x[:, :2]).int()), x)
print(*[counters[area][name] for area, name in (("inductor", "fxgraph_cache_miss"), ("inductor", "fxgraph_cache_hit"),
                                                ("aot_autograd", "autograd_cache_hit"))])
"""


def test_a_second_process_finds_the_graph_in_the_cache(device: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]),
    }
    found = [
        subprocess.run(
            [sys.executable, "-c", CACHED_PROGRAM, device], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    # misses, hits of the graph cache, hits of the AOTAutograd cache above it (which then asks the former no more)
    assert found == ["1 0 0\n", "0 1 1\n"]
