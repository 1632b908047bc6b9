"""Races on purpose: the protocol of csrc/transport/fence.h with ranks held up where it hurts.

Every step is compared with reference.py bit for bit, and fresh random rows in each step make a row of another round
visible. A rank that is held up sleeps (set_delay); nothing here is timed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from cases import BY_NAME, Case, Step, make_group
from ranks import Rank, RankPool

from torch_moe_ep import _C, MoEEpCommunication

POINTS = ("before_put", "before_flag", "after_flags")
EXCHANGE = Case("exchange", tokens=(8,), top_k=4, num_experts=8, routing="distinct")
LOCAL = replace(EXCHANGE, name="local", routing="local")
HOLD_UP = 30_000  # microseconds


def script(order: str, cases: Iterable[Case]) -> list[tuple[str, int, Case]]:
    """'D D C C' over cases: dispatches numbered as they come, combines in the same order."""
    cases, made, done, out = iter(cases), [], 0, []
    for letter in order.split():
        if letter == "D":
            made.append(next(cases))
            out.append(("D", len(made) - 1, made[-1]))
        else:
            out.append(("C", done, made[done]))
            done += 1
    return out


def run_script(
    rank: Rank, order: str, cases: list[Case], delays: dict[int, dict[str, int]], rounds: int = 1
) -> None:
    """Runs ``order`` ``rounds`` times on one communicator; ``delays``: by rank and point, microseconds."""
    w = rank.world_size
    widest = max(cases, key=lambda case: case.tokens_per_rank(w))
    group = make_group(widest, w, rank.rank, rank.device)
    try:
        steps = [
            [Step(case, w, rank.rank, 1000 * n + i, rank.device) for i, case in enumerate(cases)] for n in range(rounds)
        ]
        for point, usec in delays.get(rank.rank, {}).items():
            _C.set_delay(group.comm, point, usec)
        for n in range(rounds):
            for letter, i, _ in script(order, cases):
                if letter == "D":
                    steps[n][i].dispatch(group)
                else:
                    steps[n][i].combine(group)
    finally:
        group.destroy()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("order", ["D D", "D D C C", "D C D C", "D D D C C C"])
@pytest.mark.parametrize("ep_size", [2, 3])
def test_one_slow_rank(ranks: Callable[[int], RankPool], order: str, slow: int, point: str, ep_size: int) -> None:
    """Among them the example of fence.h: dispatch, dispatch, with rank 1 held up between its flags and its gets."""
    cases = [EXCHANGE] * order.count("D")
    ranks(ep_size).run(run_script, order, cases, {slow: {point: HOLD_UP}})


def test_50_rounds_without_data_dependency(ranks: Callable[[int], RankPool]) -> None:
    """All tokens stay local, so only the protocol itself holds the fast ranks back; every third step crosses ranks."""
    slow = {1: {"after_flags": 2000, "before_put": 1000}}
    ranks(3).run(run_script, "D C D D C C D C", [LOCAL, EXCHANGE, LOCAL, LOCAL], slow, 13)


def run_random_rounds(rank: Rank, seed: int, rounds: int, two_ops: bool = False) -> None:
    """``rounds`` random steps; every rank draws the same sequence and its own delays. ``two_ops``: some are a start and
    a wait, and each rank computes for a time of its own in between."""
    w = rank.world_size
    shared, own = random.Random(seed), random.Random(f"{seed}/{rank.rank}")
    most = replace(EXCHANGE, tokens=(12,), top_k=4, spare_rows=4)
    group = make_group(most, w, rank.rank, rank.device)
    pending: list[Step] = []

    def between() -> None:
        time.sleep(own.choice([0, 0, 0, own.randrange(1500)]) / 1e6)

    try:
        for n in range(rounds):
            for point in POINTS:
                _C.set_delay(group.comm, point, own.choice([0, 0, 0, 0, own.randrange(1500)]))
            form = shared.choice([None, between, between]) if two_ops else None
            if pending and (len(pending) == 3 or shared.random() < 0.5):
                step = pending.pop(shared.randrange(len(pending)))
                step.between = form
                step.combine(group)
                continue
            case = replace(
                most,
                name=f"random {n}",
                tokens=tuple(shared.randrange(13) for _ in range(w)),
                top_k=shared.randint(1, 4),
                spare_rows=shared.randrange(4),
                routing=shared.choice(["distinct", "local", "dirty", "one_rank", "nowhere", "duplicates"]),
            )
            step = Step(case, w, rank.rank, seed, rank.device, between=form)
            step.dispatch(group)
            pending.append(step)
        for step in pending:
            step.combine(group)
    finally:
        group.destroy()


@pytest.mark.parametrize("ep_size", [2, 3, 4])
def test_random_rounds(ranks: Callable[[int], RankPool], ep_size: int) -> None:
    ranks(ep_size).run(run_random_rounds, 11 + ep_size, 300)


def run_two(rank: Rank, two_communicators: bool) -> None:
    """dispatch A, dispatch B, combine A, combine B and combine B, combine A."""
    w = rank.world_size
    a = make_group(EXCHANGE, w, rank.rank, rank.device)
    b: MoEEpCommunication = a
    if two_communicators:
        b = make_group(EXCHANGE, w, rank.rank, rank.device, namespace="b")
        assert a.comm != b.comm
    try:
        if rank.rank == 1:
            for group in (a, b):
                _C.set_delay(group.comm, "after_flags", 5000)
        for n in range(10):
            first, second = (Step(EXCHANGE, w, rank.rank, 2 * n + i, rank.device) for i in range(2))
            first.dispatch(a)
            second.dispatch(b)
            for step, group in ((first, a), (second, b)) if n % 2 else ((second, b), (first, a)):
                step.combine(group)
    finally:
        for group in {id(a): a, id(b): b}.values():
            group.destroy()


@pytest.mark.parametrize("two_communicators", [False, True])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_interleaved(ranks: Callable[[int], RankPool], two_communicators: bool, ep_size: int) -> None:
    ranks(ep_size).run(run_two, two_communicators)


def run_reused_routing(rank: Rank) -> None:
    """A combine may be repeated: routing is a plain tensor."""
    group = make_group(EXCHANGE, rank.world_size, rank.rank, rank.device)
    try:
        if rank.rank == 0:
            _C.set_delay(group.comm, "after_flags", HOLD_UP)
        step = Step(EXCHANGE, rank.world_size, rank.rank, 5, rank.device)
        step.dispatch(group)
        truth, rows = step.expected_out, step.expert_output
        for scale in (1.0, 2.0, 0.5):  # powers of two: the sums scale exactly
            step.expert_output, step.expected_out = rows * scale, truth * scale
            step.combine(group)
    finally:
        group.destroy()


def test_combine_after_combine(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_reused_routing)
    ranks(3).run(run_reused_routing)


def run_masked_rounds(rank: Rank) -> None:
    """A rank that is masked for some rounds runs ahead through them alone and fits in again."""
    w = rank.world_size
    masked = replace(BY_NAME["masked_rank"], name="masked", tokens=(8,), top_k=4, eplb=None)
    group = make_group(replace(EXCHANGE, masked=(1,)), w, rank.rank, rank.device)
    try:
        if rank.rank == 0:
            _C.set_delay(group.comm, "after_flags", 3000)
        for n in range(12):
            step = Step(masked if n % 4 in (1, 2) else EXCHANGE, w, rank.rank, n, rank.device)
            step.dispatch(group)
            step.combine(group)
    finally:
        group.destroy()


def test_rounds_with_a_masked_rank(ranks: Callable[[int], RankPool]) -> None:
    ranks(3).run(run_masked_rounds)
