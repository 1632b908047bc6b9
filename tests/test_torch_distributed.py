"""What is particular to the backend over collectives; test_rows, test_compile and test_autograd run it too."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import BY_NAME, Case, Step, group_for, make_group
from ranks import Rank, RankError, RankPool
from tiny_model import PATIENCE, open_group, route, tokens
from torch._inductor.utils import fresh_cache, run_and_get_code

import torch_moe_ep
from torch_moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    TorchDistributedAlltoAll,
    TorchDistributedConfig,
    create_communication,
    create_local_group,
)

PARAMS = MoEEpCommParams(num_experts=6, top_k=2, max_tokens_per_rank=8, hidden_size=16, dtype=torch.float32)


@pytest.fixture
def device() -> str:
    """What is tested here has no GPU in it; the tests named above run on one too."""
    return "cpu"


def make(rank: Rank, case: Case, **options: Any) -> MoEEpCommunication:
    return make_group(case, rank.world_size, rank.rank, rank.device, backend="torch_distributed", **options)


# --- The same bits as the one-sided backend ---------------------------------------------------------------------------


def compare_with_one_sided(rank: Rank) -> None:
    """Not through reference.py: the two backends on the same inputs, gradients too."""
    case = replace(BY_NAME["order_of_sums"], name="both backends", dtype=torch.bfloat16)
    groups = [make_group(case, rank.world_size, rank.rank, "cpu"), make(rank, case)]
    step = Step(case, rank.world_size, rank.rank, 0)
    results = []
    for group in groups:
        # A sum that is NaN is NaN on both, but PyTorch rounds it to another of the NaNs of bfloat16.
        x = step.inputs.hidden_states.nan_to_num(0).requires_grad_()
        assert step.inputs.topk_weights is not None
        weights = step.inputs.topk_weights.nan_to_num(0).requires_grad_()
        got = torch_moe_ep.dispatch(group_for(case, group), x, step.inputs.topk_ids, weights,
                                    tokens_per_rank=step.tokens_per_rank)
        holds = step.expected.holds_token.unsqueeze(1)
        rows = torch.where(holds, got.hidden_states * torch.where(holds, got.topk_weights, 0).sum(1, keepdim=True), 0)
        out = torch_moe_ep.combine(group_for(case, group), rows.bfloat16(), got.routing, num_tokens=len(x))
        out.float().square().sum().backward()
        w = rank.world_size
        results.append([out, x.grad, weights.grad, got.topk_ids, got.routing[1 : 1 + w] >= 0,
                        got.routing[1 + w :, : len(x)]])
    for group in groups:
        group.destroy()
    for number, (mine, theirs) in enumerate(zip(*results, strict=True)):
        assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), number


@pytest.mark.parametrize("ep_size", [1, 2, 3])
def test_bits_and_gradients_of_the_one_sided_backend(ranks: Callable[[int], RankPool], ep_size: int) -> None:
    ranks(ep_size).run(compare_with_one_sided)


# --- Order ------------------------------------------------------------------------------------------------------------


def opposing(
    a: MoEEpCommunication, b: MoEEpCommunication, x: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """dispatch A, dispatch B, combine B, combine A; nothing of A depends on B or the other way round."""
    got_a, got_b = torch_moe_ep.dispatch(a, x, ids), torch_moe_ep.dispatch(b, 2 * x, ids)
    sum_b = torch_moe_ep.combine(b, got_b.hidden_states, got_b.routing, num_tokens=x.shape[0])
    sum_a = torch_moe_ep.combine(a, got_a.hidden_states, got_a.routing, num_tokens=x.shape[0])
    return sum_a, sum_b


def run_opposing(rank: Rank, two_process_groups: bool, compiled: bool) -> list[str]:
    """The process groups of the all-to-alls in the code, in order."""
    torch._dynamo.reset()
    second = dist.new_group() if two_process_groups else None
    a, b = (
        create_communication(BootstrapConfig(rank.world_size, rank.rank, process_group=group), PARAMS,
                             TorchDistributedConfig(check_steps=False), namespace=name)
        for name, group in (("a", None), ("b", second))
    )
    x = tokens(5 - rank.rank, rank.rank)
    ids, _ = route(x, tokens(16, 99)[:, :6])
    run, names = opposing, []
    if compiled:
        with fresh_cache(), torch.no_grad():
            run = torch.compile(opposing, fullgraph=True, dynamic=False)
            _, (code,) = run_and_get_code(run, a, b, x, ids)
        names = re.findall(r"_c10d_functional\.all_to_all_single\.default\(.*'([^']+)'\)", code)
    sum_a, sum_b = run(a, b, x, ids)
    # Every rank that a token goes to answers with the token itself, once.
    targets = torch.tensor([len({rank_of(i, rank.world_size) for i in row}) for row in ids.tolist()]).unsqueeze(1)
    torch.testing.assert_close(sum_a, x * targets)
    torch.testing.assert_close(sum_b, 2 * x * targets)
    where = {a.process_group.group_name: "a"}  # type: ignore[attr-defined]
    where.setdefault(b.process_group.group_name, "b")  # type: ignore[attr-defined]
    a.destroy()
    b.destroy()
    return [where[name] for name in names]


def rank_of(expert: int, ep_size: int) -> int:
    return next(r for r in range(ep_size) if expert in PARAMS.local_experts(r, ep_size))


@pytest.mark.parametrize("two_process_groups", [False, True])
def test_opposing_orders(ranks: Callable[[int], RankPool], two_process_groups: bool) -> None:
    assert ranks(2).run(run_opposing, two_process_groups, False) == [[], []]


@pytest.mark.parametrize("two_process_groups", [False, True])
def test_opposing_orders_compiled(ranks: Callable[[int], RankPool], two_process_groups: bool) -> None:
    order = ["a", "b", "b", "a"] if two_process_groups else ["a"] * 4
    assert ranks(2).run(run_opposing, two_process_groups, True, timeout=PATIENCE) == [order, order]


# --- Errors -----------------------------------------------------------------------------------------------------------

X, IDS = torch.zeros(4, 16), torch.zeros(4, 2, dtype=torch.int64)
WEIGHTS = torch.ones(4, 2)
# What the last rank does where the others dispatch X, IDS, WEIGHTS with R = 5; words of every rank's error.
DISAGREEMENTS: dict[str, tuple[Callable[[MoEEpCommunication], Any], tuple[str, str, str]]] = {
    "tokens_per_rank": (lambda g: torch_moe_ep.dispatch(g, X, IDS, WEIGHTS, tokens_per_rank=6),
                        ("tokens_per_rank", "5", "6")),
    "the op": (lambda g: torch_moe_ep.combine(g, torch.zeros(15, 16), torch.full((6, 5), -1, dtype=torch.int32),
                                              num_tokens=4), ("the op", "dispatch", "combine")),
    "top_k": (lambda g: torch_moe_ep.dispatch(g, X, IDS[:, :1], WEIGHTS[:, :1], tokens_per_rank=5),
              ("top_k", "2", "1")),
    "weights": (lambda g: torch_moe_ep.dispatch(g, X, IDS, tokens_per_rank=5), ("topk_weights", "8", "0")),
    "hidden": (lambda g: torch_moe_ep.dispatch(g, X[:, :8], IDS, WEIGHTS, tokens_per_rank=5),
               ("hidden row", "64", "32")),
    "scale": (lambda g: torch_moe_ep.dispatch(g, X, IDS, WEIGHTS, tokens_per_rank=5, hidden_states_scale=X[:, :1]),
              ("hidden_states_scale", "0", "4")),
    "statistics": (lambda g: torch_moe_ep.dispatch(g, X, IDS, WEIGHTS, tokens_per_rank=5,
                                                   eplb_local_stats=torch.zeros(2, dtype=torch.int32)),
                   ("eplb_local_stats", "0", "2")),
}


def run_disagreement(rank: Rank, name: str) -> str:
    group = make(rank, BY_NAME["plain"])
    last = rank.rank == rank.world_size - 1
    with pytest.raises(RuntimeError) as caught:
        if last:
            DISAGREEMENTS[name][0](group)
        else:
            torch_moe_ep.dispatch(group, X, IDS, WEIGHTS, tokens_per_rank=5)
    step = Step(BY_NAME["plain"], rank.world_size, rank.rank, 0)
    step.dispatch(group)  # nothing was sent: the communicator goes on
    step.combine(group)
    group.destroy()
    return str(caught.value)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_between_ranks(ranks: Callable[[int], RankPool], name: str) -> None:
    what, usual, odd = DISAGREEMENTS[name][1]
    for rank, text in enumerate(ranks(3).run(run_disagreement, name)):
        peer = 2 if rank < 2 else 0
        mine, theirs = (usual, odd) if rank < 2 else (odd, usual)
        assert what in text and f"rank {rank} has {mine}, rank {peer} has {theirs};" in text, text


def run_compiled_disagreement(rank: Rank) -> None:
    torch._dynamo.reset()
    group = make(rank, BY_NAME["plain"])
    run = torch.compile(lambda x, ids: torch_moe_ep.dispatch(group, x, ids, tokens_per_rank=5 + rank.rank).topk_ids,
                        fullgraph=True, dynamic=False, backend="aot_eager")
    with pytest.raises(RuntimeError, match="dispatch: ranks disagree about the step; call it outside torch.compile"):
        run(X, IDS)
    group.destroy()


def test_disagreement_between_compiled_ranks(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_compiled_disagreement, timeout=PATIENCE)


def run_sizes_disagree(rank: Rank) -> None:
    case = replace(BY_NAME["plain"], num_experts=16 + rank.rank)
    with pytest.raises(ValueError, match=rf"num_experts: rank {rank.rank} has 1\d, rank \d has 1\d; it must"):
        make(rank, case)
    with pytest.raises(ValueError, match=r"check_steps: rank \d has (True|False), rank \d has"):
        make(rank, BY_NAME["plain"], check_steps=rank.rank == 0)


def test_sizes_disagree(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_sizes_disagree)


BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden_states": X[0]}, ValueError, "hidden_states: expected [T, *] with at least 2 dimensions, got 1"),
    ({"topk_ids": IDS[0]}, ValueError, "topk_ids: expected [T, K], got 1 dimensions"),
    ({"topk_ids": IDS.short()}, TypeError, "topk_ids: expected int32 or int64, got torch.int16"),
    ({"topk_ids": IDS[:3]}, ValueError, "topk_ids: expected the rows of hidden_states: 4, got 3"),
    ({"topk_ids": IDS[:, :0]}, ValueError, "topk_ids: expected K of at least: 1, got 0"),
    ({"topk_weights": IDS}, TypeError, "topk_weights: expected a floating-point dtype, got torch.int64"),
    ({"topk_weights": WEIGHTS[:, :1]}, ValueError, "topk_weights: expected the K columns of topk_ids: 2, got 1"),
    ({"hidden_states_scale": X[:3]}, ValueError, "hidden_states_scale: expected the rows of hidden_states: 4, got 3"),
    ({"eplb_local_stats": X[0]}, TypeError, "eplb_local_stats: expected int32, got torch.float32"),
    ({"tokens_per_rank": 3}, ValueError, "tokens_per_rank: expected at least the rows of hidden_states: 4, got 3"),
    ({"active_rank_mask": torch.ones(1)}, ValueError, "active_rank_mask: expected None, for a collective waits"),
    ({"topk_ids": IDS.to("meta")}, ValueError, "topk_ids: expected device cpu (that of hidden_states), got meta"),
]


@pytest.mark.parametrize("changes, kind, text", BAD_ARGUMENTS)
def test_bad_arguments_of_dispatch(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    group = open_group(0, 1, "cpu", backend="torch_distributed")
    with pytest.raises(kind, match=re.escape(f"dispatch: {text}")):
        torch_moe_ep.dispatch(group, **{"hidden_states": X, "topk_ids": IDS, **changes})
    group.destroy()


def test_bad_arguments_of_combine() -> None:
    group = open_group(0, 1, "cpu", backend="torch_distributed")
    got = torch_moe_ep.dispatch(group, X, IDS, tokens_per_rank=5)
    rows = got.hidden_states
    for (output, routing, count), kind, text in [
        ((rows.int(), got.routing, 4), TypeError, "expert_output: expected bfloat16, float16, float32 or float64"),
        ((rows[:4], got.routing, 4), ValueError, "expert_output: expected one row per row received"),
        ((rows, got.routing.long(), 4), TypeError, "routing: expected the int32 tensor of a dispatch"),
        ((rows, got.routing[:2], 4), ValueError, "routing: expected [1 + ep_size + M, R] of a dispatch of ep_size 1"),
        ((rows, got.routing, 6), ValueError, "num_tokens: expected at most tokens_per_rank: 5, got 6"),
    ]:
        with pytest.raises(kind, match=re.escape(f"combine: {text}")):
            torch_moe_ep.combine(group, output, routing, num_tokens=count)
    for out, kind, text in [
        (torch.zeros(4, 16, dtype=torch.float64), TypeError, "out: expected torch.float32 (that of expert_output)"),
        (torch.zeros(3, 16), ValueError, "out: expected num_tokens rows: 4, got 3"),
        (torch.zeros(4, 15), ValueError, "out: expected the columns of expert_output: 16, got 15"),
    ]:
        with pytest.raises(kind, match=re.escape(f"combine: {text}")):
            torch_moe_ep.combine(group, rows, got.routing, num_tokens=4, out=out)
    torch_moe_ep.combine(group, rows, got.routing, num_tokens=4)
    group.destroy()


def run_missing_rank(rank: Rank) -> tuple[str, float]:
    """Rank 1 stays away from a dispatch; the process group's own timeout ends the wait of the others."""
    impatient = dist.new_group(timeout=timedelta(seconds=2))
    group = create_communication(
        BootstrapConfig(rank.world_size, rank.rank, process_group=impatient), PARAMS, "torch_distributed"
    )
    begin = time.monotonic()
    if rank.rank == 1:
        time.sleep(4)
        return "", 0
    with pytest.raises(RuntimeError) as caught:
        torch_moe_ep.dispatch(group, X, IDS)
    return str(caught.value), time.monotonic() - begin


def test_a_rank_that_does_not_come() -> None:
    with RankPool(2) as pool:  # its process group is broken afterwards
        text, seconds = pool.run(run_missing_rank)[0]
    assert "Timed out waiting 2000ms" in text and 1.5 < seconds < 3.9, (text, seconds)


# --- The class --------------------------------------------------------------------------------------------------------


def run_class(rank: Rank) -> None:
    case, w = replace(BY_NAME["plain"], spare_capacity=3), rank.world_size
    group = make(rank, case)
    assert isinstance(group, TorchDistributedAlltoAll) and group.describe()["backend"] == "gloo"
    with pytest.raises(RuntimeError, match="combine called before dispatch"):
        group.combine(torch.zeros(0, 16))
    for seed in range(2):
        step = Step(case, w, rank.rank, seed)
        inputs, r = step.inputs, step.tokens_per_rank
        got = group.dispatch(inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, runtime_max_tokens_per_rank=r)
        with pytest.raises(RuntimeError, match="dispatch called twice without an intervening combine"):
            group.dispatch(inputs.hidden_states, inputs.topk_ids)
        assert torch.equal(got.topk_ids, step.expected.topk_ids) and got.tokens_per_rank == r
        buffer = group.get_combine_input_buffer(torch.float32)
        assert buffer is not None
        out = torch.empty_like(step.expected_out)
        assert group.combine(buffer.copy_(step.expert_output), output=out) is out
        assert torch.equal(out, step.expected_out)
    with pytest.raises(ValueError, match="runtime_max_tokens_per_rank: expected 1.."):
        group.dispatch(inputs.hidden_states, inputs.topk_ids, runtime_max_tokens_per_rank=99)
    twin = make(rank, case)
    assert twin.comm == group.comm  # nothing lives between ops, and compiled code serves both
    group.destroy()
    group.destroy()
    Step(case, w, rank.rank, 5).dispatch(twin)
    twin.destroy()
    with pytest.raises(RuntimeError, match="TorchDistributedAlltoAll has been destroyed; create a new one"):
        group.dispatch(X, IDS)
    with pytest.raises(ValueError, match=re.escape(f"no communicator named '{twin.comm}' is open")):
        torch_moe_ep.dispatch(twin, X, IDS)


@pytest.mark.parametrize("ep_size", [1, 3])
def test_class(ranks: Callable[[int], RankPool], ep_size: int) -> None:
    if ep_size == 1:
        group = open_group(0, 1, "cpu", backend="torch_distributed")
        assert group.describe()["process_group"] is None  # a single rank needs no torch.distributed
        group.destroy()
    else:
        ranks(ep_size).run(run_class)


def test_what_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="torch.distributed is not initialised"):
        create_communication(BootstrapConfig(2, 0), PARAMS, "torch_distributed")
    with pytest.raises(RuntimeError, match="BootstrapConfig.tcp_store: the torch_distributed backend sends rows"):
        create_communication(BootstrapConfig(2, 0, tcp_store=dist.HashStore()), PARAMS, "torch_distributed")
    with pytest.raises(ValueError, match="backend: .*TorchDistributedConfig.*process group"):
        create_local_group(2, PARAMS, TorchDistributedConfig())
    with pytest.raises(TypeError, match="TorchDistributedConfig.check_steps: expected True, False or None, got 1"):
        TorchDistributedConfig(check_steps=1)  # type: ignore[arg-type]


def run_mask(rank: Rank) -> None:
    group = make(rank, BY_NAME["plain"])
    try:
        group.dispatch(X, IDS, active_rank_mask=torch.ones(1, dtype=torch.uint64))  # type: ignore[call-arg]
    finally:
        group.destroy()


def test_masks_are_refused(ranks: Callable[[int], RankPool]) -> None:
    with pytest.raises(RankError, match="active_rank_mask: expected None, for a collective waits for every rank"):
        ranks(2).run(run_mask)


ENDED = """
import os, sys
import torch, torch.distributed as dist
from torch_moe_ep import BootstrapConfig, MoEEpCommParams, create_communication

def threads():
    return [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]

backend, destroyed = sys.argv[1:]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.new_group()
params = MoEEpCommParams(num_experts=4, top_k=2, max_tokens_per_rank=8, hidden_size=16, dtype=torch.float32)
comm = create_communication(BootstrapConfig(1, 0, process_group=group), params, backend)
comm.dispatch(torch.ones(2, 16), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2))
comm.combine(torch.ones(8, 16))
assert any("gloo" in name for name in threads()), threads()
if destroyed == "destroyed":
    comm.destroy()
else:
    comm.bootstrap.process_group = None  # a caller's own reference
del group
dist.destroy_process_group()
assert not any("gloo" in name for name in threads()), threads()
"""


@pytest.mark.parametrize(
    ("backend", "destroyed"),
    [("torch_distributed", "destroyed"), ("torch_distributed", "live"), ("shm_one_sided", "destroyed")],
)
def test_process_group_ends(backend: str, destroyed: str) -> None:
    """A communicator keeps no process group alive: its threads, met by the interpreter's end, abort the process."""
    run = subprocess.run(
        [sys.executable, "-c", ENDED, backend, destroyed], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
