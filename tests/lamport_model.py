"""A model of the Lamport transport (csrc/transport/lamport.h), and a search of every order of its steps.

W ranks do N rounds each. In round n a rank
    puts      a header to every peer, and a row of two vectors to each peer that ``routes`` names for (rank, n);
    takes     polls the vectors of each row that comes to it, one after the other, until the tag is right;
    ends      once it has the header of round n from every peer.
Stores are in flight until the model delivers them, in any order among locations, in order to one location; a rank's
round begins after its last one has ended and its stores of that one have been delivered (a kernel boundary).
A location holds (tag, value), and what is polled must have the value that was put in this round.

Run as a program, it prints what the search finds with the protocol as it is and with each of its parts taken out:

    python tests/lamport_model.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import model

Location = tuple[int, str, int, int, int]  # window of, "row" or "header", set, from, vector


@dataclass(frozen=True)
class Protocol:
    sets: int = 2  # of landing memory
    headers: bool = True  # a rank awaits its peers' headers before it ends a round
    whole_tags: bool = True  # False: a tag says only that something was put, as one bit that nobody clears would


class Rank(NamedTuple):
    round: int  # of the N; N + 1 when all are done
    has_put: bool
    taken: tuple[tuple[int, int], ...]  # (source, vector) polled in this round


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    memory: frozenset[tuple[Location, tuple[int, int]]]
    in_flight: tuple[tuple[int, Location, tuple[int, int]], ...]  # (round of the sender, ...), oldest first


VECTORS = 2


def explore(routes: model.Routes, world: int, rounds: int, protocol: Protocol) -> tuple[str | None, int]:
    """None, or a sentence about the first state found in which a rank takes what was not put for it, or none can move;
    and how many states were seen."""

    def set_of(n: int) -> int:
        return n % protocol.sets

    def tag_of(n: int) -> int:
        return n if protocol.whole_tags else 1

    def expected(rank: int, n: int) -> list[tuple[int, int]]:
        return [(s, v) for s in range(world) if s != rank and rank in routes[s, n] for v in range(VECTORS)]

    start = State(tuple(Rank(1, False, ()) for _ in range(world)), frozenset(), ())

    def successors(state: State) -> list[State] | str:
        memory = dict(state.memory)
        following: list[State] = []
        # A store arrives.
        first_to: set[Location] = set()
        for i, (_, where, what) in enumerate(state.in_flight):
            if where in first_to:
                continue
            first_to.add(where)
            rest = state.in_flight[:i] + state.in_flight[i + 1 :]
            following.append(State(state.ranks, frozenset({**memory, where: what}.items()), rest))
        for me, rank in enumerate(state.ranks):
            n = rank.round
            if n > rounds:
                continue

            def step(changed: Rank, flights: tuple, me: int = me, state: State = state) -> State:
                return State((*state.ranks[:me], changed, *state.ranks[me + 1 :]), state.memory, flights)

            if not rank.has_put:
                sent = [
                    (n, (p, "header", set_of(n), me, 0), (n, n)) for p in range(world) if p != me and protocol.headers
                ] + [(n, (p, "row", set_of(n), me, v), (tag_of(n), n)) for p in routes[me, n] for v in range(VECTORS)]
                following.append(step(rank._replace(has_put=True), (*state.in_flight, *sent)))
                continue
            left = [e for e in expected(me, n) if e not in rank.taken]
            if left:
                source, vector = left[0]
                tag, value = memory.get((me, "row", set_of(n), source, vector), (0, 0))
                if tag == tag_of(n):
                    if value != n:
                        what = f"vector {vector} of rank {source}"
                        return f"round {n}: rank {me} takes for {what} what was put in round {value}"
                    taken = rank._replace(taken=(*rank.taken, (source, vector)))
                    following.append(step(taken, state.in_flight))
                elif tag > tag_of(n):
                    return f"round {n}: vector {vector} of rank {source} was overwritten before rank {me} took it"
                continue
            heard = all(
                memory.get((me, "header", set_of(n), p, 0), (0, 0))[0] == n for p in range(world) if p != me
            )
            performed = not any(where[3] == me for _, where, _ in state.in_flight)
            if (heard or not protocol.headers) and performed:
                following.append(step(Rank(n + 1, False, ()), state.in_flight))
        if not following and any(rank.round <= rounds for rank in state.ranks):
            return f"no rank can move: {state.ranks}"
        return following

    return model.explore(start, successors)


PLANTED = {
    "the protocol": Protocol(),
    "one set of landing memory": Protocol(sets=1),
    "no headers": Protocol(headers=False),
    "a tag of one bit": Protocol(whole_tags=False),
}


def search(world: int, rounds: int, protocol: Protocol) -> tuple[str | None, int, int]:
    """As :func:`model.search`, with at most one row in a round."""
    return model.search(model.all_routes(world, rounds), lambda routes: explore(routes, world, rounds, protocol))


if __name__ == "__main__":
    for name, protocol in PLANTED.items():
        for world, rounds in ((2, 4), (3, 3)):
            found, routings, states = search(world, rounds, protocol)
            found = found or f"nothing in {routings} routings, {states} states"
            print(f"{name}; {world} ranks, {rounds} rounds: {found}")
