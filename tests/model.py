"""A search of every order in which the ranks of a protocol can take their steps: what lamport_model.py and
counted_model.py share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Routes = dict[tuple[int, int], set[int]]
"""``routes[rank, round]``: the ranks to which it puts a row."""
State = TypeVar("State", bound=Hashable)


def explore(start: State, successors: Callable[[State], list[State] | str]) -> tuple[str | None, int]:
    """Visits every state. ``successors`` gives those one step further, or says what is wrong with the state: the first
    such sentence, or None, and the number of states that were seen."""
    seen, stack = {start}, [start]
    while stack:
        following = successors(stack.pop())
        if isinstance(following, str):
            return following, len(seen)
        for new in following:
            if new not in seen:
                seen.add(new)
                stack.append(new)
    return None, len(seen)


def search(
    routings: Iterable[Routes], explore_one: Callable[[Routes], tuple[str | None, int]]
) -> tuple[str | None, int, int]:
    """What was found first, and how many routings, and states of routings without fault, were looked at."""
    states = number = 0
    for number, routes in enumerate(routings, 1):
        found, seen = explore_one(routes)
        if found:
            return found, number, states
        states += seen
    return None, number, states


def all_routes(world: int, rounds: int, per_round: int = 1) -> list[Routes]:
    """Every way in which at most ``per_round`` ranks put a row to one peer in each round."""
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    choices = [c for k in range(per_round + 1) for c in itertools.combinations(pairs, k)]
    out = []
    for picked in itertools.product(choices, repeat=rounds):
        routes: Routes = {(r, n): set() for r in range(world) for n in range(1, rounds + 1)}
        for n, rows in enumerate(picked, 1):
            for a, b in rows:
                routes[a, n].add(b)
        out.append(routes)
    return out
