"""A model of counted writes (csrc/transport/counted.h), and a search of every order of their steps.

W ranks of one block each do the rounds of ``kinds``, dispatches ("d") and combines ("c"). In round n a rank
    begins    posts a done word to its peers; before a round of the same kind as the last it awaits theirs;
    tells     each peer the total of bytes it has ever put there, and raises its flag;
    puts      a row of two bytes at each peer that ``routes`` names for (rank, n): each byte lands, and is counted, on
              its own;
    awaits    the flags of all peers, and then, for each peer, that the counter is at least the total it told;
    takes     the rows that came, one byte at a time;
    ends      when all it has put has landed and is counted.
Totals and bytes are in flight until the model delivers them, in any order; a flag comes with the total it speaks for.
Done words come at once, and a byte is counted as it lands: what waits for them waits for "at least", so a later arrival
only takes orders away. What is taken must have been put in this round.

Run as a program, it prints what the search finds with the protocol as it is and with each of its parts taken out:

    python tests/counted_model.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import model

BYTES = 2  # of a row


@dataclass(frozen=True)
class Protocol:
    awaits_reuse: bool = True
    ends_after_puts: bool = True
    total_before_flag: bool = True
    running_totals: bool = True  # False: a total is that of the round, and the receiver resets the counter after it


class Rank(NamedTuple):
    round: int
    step: str  # begin, reuse, tell, await, take
    taken: tuple[tuple[int, int], ...]  # (source, byte) of this round
    sent: tuple[int, ...]  # bytes ever put at each rank


class Store(NamedTuple):
    """In flight: ``values`` by location, and what it adds to a counter."""

    sender: int
    values: tuple[tuple[tuple, int], ...]
    counter: tuple | None = None


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    memory: frozenset[tuple[tuple, int]]
    in_flight: tuple[Store, ...]


def explore(routes: model.Routes, world: int, kinds: str, protocol: Protocol) -> tuple[str | None, int]:
    """None, or a sentence about the first state found in which a rank takes what was not put for it, or none can move;
    and how many states were seen."""
    rounds = len(kinds)

    def kind(n: int) -> str:
        return kinds[n - 1]

    start = State(tuple(Rank(1, "begin", (), (0,) * world) for _ in range(world)), frozenset(), ())

    def successors(state: State) -> list[State] | str:
        memory = dict(state.memory)
        following: list[State] = []
        first_to: set[tuple] = set()
        for i, store in enumerate(state.in_flight):
            where = store.values[0][0]
            if where in first_to:  # stores of one rank to one location keep their order
                continue
            first_to.add(where)
            rest = state.in_flight[:i] + state.in_flight[i + 1 :]
            changed = {**memory, **dict(store.values)}
            if store.counter is not None:
                changed[store.counter] = memory.get(store.counter, 0) + 1
            following.append(State(state.ranks, frozenset(changed.items()), rest))
        for me, rank in enumerate(state.ranks):
            n = rank.round
            if n > rounds:
                continue
            peers = [p for p in range(world) if p != me]

            def step(changed: Rank, stores: tuple[Store, ...] = (), values: dict | None = None, me: int = me,
                     state: State = state, memory: dict = memory) -> State:
                ranks = (*state.ranks[:me], changed, *state.ranks[me + 1 :])
                return State(ranks, frozenset({**memory, **(values or {})}.items()), (*state.in_flight, *stores))

            if rank.step == "begin":
                following.append(step(rank._replace(step="reuse"), values={(p, "done", me): n - 1 for p in peers}))
            elif rank.step == "reuse":
                waits = protocol.awaits_reuse and n > 1 and kind(n) == kind(n - 1)
                if not waits or all(memory.get((me, "done", p), 0) >= n - 1 for p in peers):
                    following.append(step(rank._replace(step="tell")))
            elif rank.step == "tell":
                sent, stores, early = list(rank.sent), [], {}
                for p in peers:
                    here = BYTES * (p in routes[me, n])
                    sent[p] = sent[p] + here if protocol.running_totals else here
                    total, flag = ((p, "total", me), sent[p]), ((p, "flag", n % 2, me), n)
                    stores.append(Store(me, (total, flag) if protocol.total_before_flag else (total,)))
                    if not protocol.total_before_flag:
                        early[flag[0]] = flag[1]
                    for byte in range(BYTES if here else 0):
                        stores.append(Store(me, (((p, "row", kind(n), me, byte), n),), (p, "counter", me)))
                following.append(step(rank._replace(step="await", sent=tuple(sent)), tuple(stores), early))
            elif rank.step == "await":
                if all(
                    memory.get((me, "flag", n % 2, p), 0) >= n
                    and memory.get((me, "counter", p), 0) >= memory.get((me, "total", p), 0)
                    for p in peers
                ):
                    following.append(step(rank._replace(step="take")))
            else:
                left = [
                    (s, b) for s in peers if me in routes[s, n] for b in range(BYTES) if (s, b) not in rank.taken
                ]
                if left:
                    source, byte = left[0]
                    value = memory.get((me, "row", kind(n), source, byte), 0)
                    if value != n:
                        what = f"byte {byte} of rank {source}"
                        return f"round {n}: rank {me} takes for {what} what was put in round {value}"
                    following.append(step(rank._replace(taken=(*rank.taken, (source, byte)))))
                elif not protocol.ends_after_puts or not any(s.sender == me and s.counter for s in state.in_flight):
                    ended = rank._replace(round=n + 1, step="begin", taken=())
                    reset = {} if protocol.running_totals else {(me, "counter", p): 0 for p in peers}
                    following.append(step(ended, values=reset))
        if not following and any(rank.round <= rounds for rank in state.ranks):
            where = ", ".join(f"rank {r} in round {rank.round} at '{rank.step}'" for r, rank in enumerate(state.ranks))
            return f"no rank can move: {where}"
        return following

    return model.explore(start, successors)


PLANTED = {
    "the protocol": Protocol(),
    "no wait before memory is reused": Protocol(awaits_reuse=False),
    "rounds that end before their puts": Protocol(ends_after_puts=False),
    "flags that may overtake totals": Protocol(total_before_flag=False),
    "counters that are reset": Protocol(running_totals=False),
}


def search(world: int, kinds: str, protocol: Protocol, rows: int) -> tuple[str | None, int, int]:
    """As :func:`model.search`, with up to ``rows`` rows in a round."""
    routings = model.all_routes(world, len(kinds), rows)
    return model.search(routings, lambda routes: explore(routes, world, kinds, protocol))


def main() -> None:
    for name, protocol in PLANTED.items():
        for world, kinds in ((2, "dcdd"), (2, "ddcd"), (3, "dd")):
            found, routings, states = search(world, kinds, protocol, rows=2 if world == 2 else 1)
            outcome = found or f"nothing found in {states} states of {routings} routings"
            print(f"{name}, {world} ranks, rounds {kinds}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
