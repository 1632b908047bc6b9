"""Machines, and what a rank on each of them says in the vote on counted writes (csrc/memory/logical_endpoint.h).

    python tests/counted_probe.py     writes tests/results/counted_probe.txt

The machines are settings of the fake driver; it needs g++ and neither a GPU nor the package.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from fake_driver import CALLS, UNICAST_CLIQUE, FakeDriver, Harness, Probe, build

RESULTS = Path(__file__).resolve().parent / "results" / "counted_probe.txt"
ENDPOINT_CALLS = tuple(name for name in CALLS if "Clique" in name or "Endpoint" in name)


@dataclass
class Machine:
    """Departures from a device of capability 10.0 with everything; ``fails``: which call of the probe, its result."""

    name: str
    knobs: dict[str, int] = field(default_factory=dict)
    compiled: bool = True
    hidden: tuple[str, ...] = ()
    cliques: list[tuple[int, int]] | None = None
    fails: tuple[int, int] | None = None


# In the order of the probe: each of the first eight lacks one thing, and a machine that lacks several hears the first.
LACKS = [
    Machine("built with CUDA 13.0", compiled=False),
    Machine("no driver", hidden=tuple(CALLS)),
    Machine("capability 9.0", {"major": 9}),
    Machine("driver of CUDA 13.0", {"version": 13000}, hidden=ENDPOINT_CALLS),
    Machine("no unicast endpoints", {"unicast": 0}),
    Machine("no counted operations", {"counted": 0}),
    Machine("no handle types", {"handle_types": 0}),
    Machine("no cliques", cliques=[]),
]
MACHINES = [
    *LACKS,
    Machine("driver of CUDA 13.3, without cliques", {"version": 13030}, hidden=tuple(CALLS[5:7])),
    Machine("capability 8.9", {"major": 8, "minor": 9}),
    Machine("handle types without fabric", {"handle_types": 2}),
    Machine("cliques of other types", cliques=[(0, 1), (1, 2), (3, 4)]),
    Machine("device 0 of none", {"devices": 0}),
    Machine("cuInit fails", fails=(1, 802)),
    Machine("the first attribute is unknown", fails=(3, 1)),
    Machine("cliques may not be seen", fails=(9, 800)),
    Machine("cliques cannot be read", fails=(10, 401)),
    Machine("an error without a name", fails=(9, 12345)),
    Machine("everything", {"major": 10, "minor": 3}),
    Machine("everything, a newer architecture", {"major": 12}),
    Machine("everything but access on the owner", {"owner_access": 0}),
    Machine("several cliques", cliques=[(3, 1), (UNICAST_CLIQUE, 4_000_000_000), (UNICAST_CLIQUE, 5)]),
]


def ask(driver: FakeDriver, harness: Harness, machine: Machine, device: int = 0) -> Probe:
    driver.reset()
    if machine.cliques is not None:
        driver.lib.fake_reset()
        for kind, number in machine.cliques:
            driver.add_clique(kind, number)
    driver.set(**machine.knobs)
    if machine.fails is not None:
        driver.fail_at(*machine.fails)
    harness.load(machine.hidden)
    found = harness.probe(device, machine.compiled)
    harness.load()
    return found


def line(machine: Machine, found: Probe) -> str:
    said = found.reason or f"yes; clique {found.clique}, owner access {'yes' if found.owner_access else 'no'}"
    return f"{machine.name}: {said}\n"


def table(driver: FakeDriver, harness: Harness) -> str:
    return "".join(line(machine, ask(driver, harness, machine)) for machine in MACHINES)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        build(Path(directory))
        fake = FakeDriver(Path(directory))
        RESULTS.write_text(table(fake, Harness(Path(directory), fake)))
    print(RESULTS.read_text(), end="")
