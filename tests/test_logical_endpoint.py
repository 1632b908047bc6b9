"""csrc/memory/logical_endpoint.h over the fake driver: the probe, the life of the endpoints and of windows with them,
every failure in it, and the vote."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counted_probe import LACKS, MACHINES, RESULTS, Machine, ask, table
from fake_driver import (
    ALIGNMENT,
    CALLS,
    EndpointArgumentError,
    EndpointError,
    Endpoints,
    FakeDriver,
    Harness,
    Window,
    Windows,
    build,
    build_windows,
    cuda_include,
)

from torch_moe_ep import _C, OP_LIBRARY, MoEEpCommParams, NVLinkOneSidedConfig
from torch_moe_ep.nvlink_one_sided import Reach, counted_refusals, reach_of_counted_writes, refusals

HERE = Path(__file__).resolve().parent
OUT_OF_MEMORY, NOT_PERMITTED, SYSTEM_NOT_READY = 2, 800, 802
DAEMONS = "; are the daemons of the fabric (fabric manager, IMEX) running?"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fake_driver")
    build(directory)
    return directory


@pytest.fixture(scope="session")
def loaded(built: Path) -> tuple[FakeDriver, Harness]:
    driver = FakeDriver(built)
    harness = Harness(built, driver)
    assert harness.load() == ""
    return driver, harness


@pytest.fixture
def driver(loaded: tuple[FakeDriver, Harness]) -> Iterator[FakeDriver]:
    """Fresh; after the test it must have seen no forbidden call, and hold nothing."""
    driver = loaded[0]
    driver.reset()
    yield driver
    assert driver.violations == []
    assert driver.held == []


@pytest.fixture
def harness(loaded: tuple[FakeDriver, Harness], driver: FakeDriver) -> Harness:
    return loaded[1]


class Group:
    """The ranks of one process, each with memory of its own."""

    def __init__(self, harness: Harness, world: int, **options: Any) -> None:
        self.harness, self.driver = harness, harness.driver
        self.memories = [self.driver.create_memory(ALIGNMENT) for _ in range(world)]
        self.ranks: list[Endpoints] = []
        try:
            for rank, memory in enumerate(self.memories):
                self.ranks.append(Endpoints(harness, memory, rank=rank, ep_size=world, **options))
        except EndpointError:
            self.close()
            raise

    def connect(self) -> None:
        handles = [rank.handle() for rank in self.ranks]
        for rank in self.ranks:
            rank.connect(handles)

    def checkpoint(self) -> None:
        for rank in self.ranks:
            rank.suspend()
        for memory in self.memories:
            self.driver.free_memory(memory)
        self.memories = [self.driver.create_memory(ALIGNMENT) for _ in self.memories]
        for rank, memory in zip(self.ranks, self.memories, strict=True):
            rank.resume(memory)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for memory in self.memories:
            self.driver.free_memory(memory)
        self.ranks, self.memories = [], []


# The probe.


@pytest.mark.parametrize("lacking", range(len(LACKS)), ids=[machine.name for machine in LACKS])
def test_first_reason_wins(driver: FakeDriver, harness: Harness, lacking: int) -> None:
    """A machine that lacks this and all that is asked later gives this reason."""
    alone = ask(driver, harness, LACKS[lacking]).reason
    assert alone
    later = LACKS[lacking:]
    all_lacking = Machine(
        "lacks all of them",
        {key: value for machine in later for key, value in machine.knobs.items()},
        compiled=all(machine.compiled for machine in later),
        hidden=tuple({name for machine in later for name in machine.hidden}),
        cliques=[],
    )
    assert ask(driver, harness, all_lacking).reason == alone


def test_reasons_are_as_recorded(driver: FakeDriver, harness: Harness) -> None:
    """Changed on purpose? python tests/counted_probe.py writes the file anew."""
    assert table(driver, harness) == RESULTS.read_text()


def test_reasons_differ(driver: FakeDriver, harness: Harness) -> None:
    reasons = {ask(driver, harness, machine).reason for machine in LACKS}
    assert len(reasons) == len(LACKS) and "" not in reasons


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_call_is_named(driver: FakeDriver, harness: Harness, name: str) -> None:
    assert harness.load([name]) == name
    found = harness.probe()
    with pytest.raises(EndpointError, match=f"does not export {name}$"):
        harness.endpoint_bytes(ALIGNMENT)
    with pytest.raises(EndpointError, match=f"does not export {name}$"):
        Endpoints(harness, driver.create_memory(ALIGNMENT))
    harness.load()
    if name in CALLS[:4]:
        assert found.reason == f"there is no CUDA driver, or one that does not export {name}"
    else:
        assert found.reason == (
            f"the driver (CUDA 13.4) does not export {name}: it needs the 615 branch or newer"
        )


def test_the_probe_changes_nothing(driver: FakeDriver, harness: Harness) -> None:
    for machine in MACHINES:
        ask(driver, harness, machine)
        assert [call for call in driver.log if call.startswith("cuLogicalEndpoint")] == []


def test_the_probe_asks_about_its_device(driver: FakeDriver, harness: Harness) -> None:
    assert ask(driver, harness, Machine("all"), device=5).reason == ""
    asked = [call for call in driver.log if call.startswith(("cuDeviceGetAttribute", "cuDeviceGetClique"))]
    assert len(asked) == 8 and all(call.endswith((", 5)", "(5)")) for call in asked)


def test_without_the_kernels_no_driver_is_asked(driver: FakeDriver, harness: Harness) -> None:
    assert harness.probe(compiled=False).reason == "built with a CUDA toolkit older than 13.4"
    assert driver.log == []


@pytest.mark.skipif(not _C.has_cuda, reason="a build without the CUDA column")
def test_the_probe_of_this_machine() -> None:
    found = _C.counted_probe(0)
    assert found.keys() == {"reason", "clique", "owner_access"}
    assert isinstance(found["reason"], str) and isinstance(found["clique"], int)
    assert isinstance(found["owner_access"], bool)


def test_the_library_does_not_need_a_driver_to_load() -> None:
    dynamic = subprocess.run(["readelf", "-d", OP_LIBRARY], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in dynamic and "libcuda.so" not in dynamic


# The life of the endpoints.


def test_what_the_driver_is_asked(driver: FakeDriver, harness: Harness) -> None:
    """Rank 1 of 2 on device 3 from the first call to the last, over one checkpoint; its endpoint is late."""
    peer = Endpoints(harness, driver.create_memory(ALIGNMENT), rank=0, ep_size=2, device=2)
    driver.set(queries=1)
    before = len(driver.log)
    memory = driver.create_memory(2 * ALIGNMENT)
    own = Endpoints(harness, memory, rank=1, ep_size=2, device=3, window_bytes=ALIGNMENT + 1,
                    physical_bytes=2 * ALIGNMENT)
    own.connect([peer.handle(), own.handle()])
    assert own.ids() == [1002, 1003]
    own.suspend()
    driver.set(queries=0)
    driver.free_memory(memory)
    own.resume(driver.create_memory(2 * ALIGNMENT))
    own.connect([peer.handle(), own.handle()])
    assert own.ids() == [1004, 1005]
    own.close()
    assert driver.log[before:] == textwrap.dedent("""\
        cuDeviceGet(3)
        cuLogicalEndpointGetLimits(3, 2097153, 1)
        cuLogicalEndpointIdReserve(2)
        cuLogicalEndpointCreate(1003, 3, 4194304, 1)
        cuLogicalEndpointQuery(1003, 1)
        cuLogicalEndpointQuery(1003, 1)
        cuLogicalEndpointBindMem(1003, 3, 0, 2, 0, 4194304, 0)
        cuLogicalEndpointExport(1000, 1)
        cuLogicalEndpointExport(1003, 1)
        cuLogicalEndpointImport(1002, 1)
        cuLogicalEndpointQuery(1002, 2)
        cuLogicalEndpointQuery(1002, 2)
        cuLogicalEndpointUnbind(1003, 3, 0, 4194304)
        cuLogicalEndpointDestroy(1002)
        cuLogicalEndpointDestroy(1003)
        cuLogicalEndpointIdRelease(1002, 2)
        cuLogicalEndpointIdReserve(2)
        cuLogicalEndpointCreate(1005, 3, 4194304, 1)
        cuLogicalEndpointQuery(1005, 1)
        cuLogicalEndpointBindMem(1005, 3, 0, 3, 0, 4194304, 0)
        cuLogicalEndpointExport(1000, 1)
        cuLogicalEndpointExport(1005, 1)
        cuLogicalEndpointImport(1004, 1)
        cuLogicalEndpointQuery(1004, 2)
        cuLogicalEndpointUnbind(1005, 3, 0, 4194304)
        cuLogicalEndpointDestroy(1004)
        cuLogicalEndpointDestroy(1005)
        cuLogicalEndpointIdRelease(1004, 2)
        """).splitlines()
    peer.close()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("queries", [0, 3])
def test_life(driver: FakeDriver, harness: Harness, world: int, queries: int) -> None:
    driver.set(queries=queries)
    group = Group(harness, world)
    for _ in range(3):
        group.connect()
        ids = [rank.ids() for rank in group.ranks]
        assert len(set(sum(ids, []))) == world * world  # one process: every rank has its own name for every endpoint
        kinds = dict(line.removeprefix("id ").split(" ", 1) for line in driver.held)
        assert kinds == {
            str(number): "owner bound" if peer == rank else "import"
            for rank in range(world) for peer, number in enumerate(ids[rank])
        }  # fmt: skip
        group.checkpoint()
    group.close()


def test_handles_are_of_the_endpoint(driver: FakeDriver, harness: Harness) -> None:
    group = Group(harness, 2)
    handles = [rank.handle() for rank in group.ranks]
    assert [len(handle) for handle in handles] == [64, 64] and handles[0] != handles[1]
    assert handles[0] == group.ranks[0].handle()
    group.close()


def test_a_checkpoint_holds_nothing(driver: FakeDriver, harness: Harness) -> None:
    group = Group(harness, 2)
    group.connect()
    for rank in group.ranks:
        rank.suspend()
    assert driver.held == []
    for rank in group.ranks:
        rank.suspend()  # no error
        for use in (rank.handle, rank.ids, lambda rank=rank: rank.connect([b"", b""])):
            with pytest.raises(EndpointError, match="the logical endpoints are suspended; resume"):
                use()
    group.close()


def test_resume_without_suspend(driver: FakeDriver, harness: Harness) -> None:
    group = Group(harness, 1)
    with pytest.raises(EndpointError, match="resume: the logical endpoints are not suspended"):
        group.ranks[0].resume(group.memories[0])
    assert driver.held == ["id 1000 owner bound"]
    group.close()


@pytest.mark.parametrize(
    ("window_bytes", "size"),
    [(1, ALIGNMENT), (ALIGNMENT, ALIGNMENT), (ALIGNMENT + 1, 2 * ALIGNMENT), (9 * ALIGNMENT - 1, 9 * ALIGNMENT)],
)
def test_size_is_rounded_up(driver: FakeDriver, harness: Harness, window_bytes: int, size: int) -> None:
    assert harness.endpoint_bytes(window_bytes) == size
    with pytest.raises(EndpointArgumentError, match=rf"at least endpoint_bytes\(\) = {size}, got {size - 1}$"):
        Endpoints(harness, driver.create_memory(size), window_bytes=window_bytes, physical_bytes=size - 1)
    memory = driver.create_memory(size)
    own = Endpoints(harness, memory, window_bytes=window_bytes, physical_bytes=size)
    own.close()


def test_alignment_is_the_drivers(driver: FakeDriver, harness: Harness) -> None:
    driver.set(alignment=3 << 16)  # no power of two
    assert harness.endpoint_bytes(ALIGNMENT) == 11 * (3 << 16)


def test_a_window_that_is_too_large(driver: FakeDriver, harness: Harness) -> None:
    driver.set(max_size=4 * ALIGNMENT - 1)
    assert harness.endpoint_bytes(3 * ALIGNMENT) == 3 * ALIGNMENT
    sentence = (
        f"a window of {3 * ALIGNMENT + 1} bytes is larger than a logical endpoint may be, {4 * ALIGNMENT - 1} bytes; "
        "lower max_tokens_per_rank"
    )
    with pytest.raises(EndpointError, match=f"^{sentence}$"):
        harness.endpoint_bytes(3 * ALIGNMENT + 1)
    with pytest.raises(EndpointError, match=f"^{sentence}$"):
        Endpoints(harness, driver.create_memory(4 * ALIGNMENT), window_bytes=3 * ALIGNMENT + 1,
                  physical_bytes=4 * ALIGNMENT)


@pytest.mark.parametrize("bad", [0, -1])
def test_a_window_of_no_bytes(driver: FakeDriver, harness: Harness, bad: int) -> None:
    with pytest.raises(EndpointArgumentError, match=f"window_bytes: expected at least 1, got {bad}"):
        harness.endpoint_bytes(bad)


@pytest.mark.parametrize(("rank", "ep_size"), [(-1, 2), (2, 2), (0, 0)])
def test_ranks_out_of_range(driver: FakeDriver, harness: Harness, rank: int, ep_size: int) -> None:
    with pytest.raises(EndpointArgumentError, match=rf"rank: expected 0..ep_size - 1 = {ep_size - 1}, got {rank}"):
        Endpoints(harness, driver.create_memory(ALIGNMENT), rank=rank, ep_size=ep_size)


def test_bad_handles(driver: FakeDriver, harness: Harness) -> None:
    group = Group(harness, 2)
    own, peer = (rank.handle() for rank in group.ranks)
    with pytest.raises(EndpointArgumentError, match="handles: expected one per rank, 2, got 1"):
        group.ranks[0].connect([own])
    with pytest.raises(EndpointArgumentError, match="handles: expected 64 bytes of rank 1, got 63"):
        group.ranks[0].connect([own, peer[:63]])
    group.ranks[0].connect([b"", peer])  # the own one is not looked at
    with pytest.raises(EndpointError, match="connect: rank 1's endpoint is connected already"):
        group.ranks[0].connect([own, peer])
    assert driver.held[1] == "id 1001 import"
    group.close()


def test_a_handle_of_an_endpoint_that_is_gone(driver: FakeDriver, harness: Harness) -> None:
    """As a rank that died before its peers connected leaves it; the third rank's endpoint is given back."""
    group = Group(harness, 3)
    handles = [rank.handle() for rank in group.ranks]
    group.ranks.pop().close()
    with pytest.raises(EndpointError, match="cuLogicalEndpointImport of rank 2's endpoint failed: CUDA_ERROR_INVALID"):
        group.ranks[0].connect(handles)
    assert driver.violations == ["import: the endpoint is gone"]
    assert driver.held == ["id 1000 owner bound", "id 1001", "id 1002", "id 1003", "id 1004 owner bound", "id 1005"]
    group.close()
    driver.reset()


def test_memory_that_cannot_be_exported(driver: FakeDriver, harness: Harness) -> None:
    with pytest.raises(EndpointError, match=r"cuLogicalEndpointBindMem failed: CUDA_ERROR_INVALID_VALUE \(1\)$"):
        Endpoints(harness, driver.create_memory(ALIGNMENT, fabric=False))
    assert driver.violations == ["bind: the memory cannot be exported"] and driver.held == []
    driver.reset()


# Endpoints that are late.


def test_own_endpoint_never_ready(driver: FakeDriver, harness: Harness) -> None:
    driver.set(never_ready=1)
    with pytest.raises(EndpointError, match="after 20 ms the driver has not made .* these ranks ready: 1; are the"):
        Endpoints(harness, driver.create_memory(ALIGNMENT), rank=1, ep_size=2, timeout_ms=20)
    assert not any("Bind" in call for call in driver.log)


def test_peers_never_ready(driver: FakeDriver, harness: Harness) -> None:
    driver.set(queries=2, never_ready=6)  # four own endpoints, then rank 0 imports ranks 1, 2 and 3
    group = Group(harness, 4, timeout_ms=50)
    handles = [rank.handle() for rank in group.ranks]
    with pytest.raises(EndpointError, match="after 50 ms the driver has not made .* these ranks ready: 2; are the"):
        group.ranks[0].connect(handles)
    assert driver.held[:4] == ["id 1000 owner bound", "id 1001", "id 1002", "id 1003"]
    group.ranks[0].connect(handles)  # the connection can be tried again
    assert [line.split()[-1] for line in driver.held[:4]] == ["bound", "import", "import", "import"]
    group.close()


# One per process.


def test_one_per_process(driver: FakeDriver, harness: Harness) -> None:
    reason = "this process has a window with logical endpoints; a process has one at a time"
    memory = driver.create_memory(ALIGNMENT)
    assert harness.occupied == ""
    first = Endpoints(harness, memory, shared=False)
    for suspended in (False, True):
        if suspended:
            first.suspend()
        before = len(driver.log)
        assert harness.occupied == reason
        with pytest.raises(EndpointError, match=f"^{reason}$"):
            Endpoints(harness, driver.create_memory(ALIGNMENT), shared=False)
        assert driver.log[before:] == []  # refused before anything is asked of the driver
    first.resume(memory)
    first.close()
    assert harness.occupied == ""
    Endpoints(harness, memory, shared=False).close()


@pytest.mark.parametrize("n", range(1, 7))
def test_a_failed_construction_leaves_the_place_free(driver: FakeDriver, harness: Harness, n: int) -> None:
    driver.fail_at(n, OUT_OF_MEMORY)
    with pytest.raises(EndpointError):
        Endpoints(harness, driver.create_memory(ALIGNMENT), shared=False)
    assert harness.occupied == ""


# Failures.

GIVES_BACK = (
    "cuLogicalEndpointUnbind", "cuLogicalEndpointDestroy", "cuLogicalEndpointIdRelease", "cuMemUnmap", "cuMemRelease",
    "cuMemAddressFree",
)  # fmt: skip


def whole_life(harness: Harness, world: int) -> list[str]:
    """The sentences of the errors on the way; closes everything in any case."""
    said = []
    try:
        group = Group(harness, world)
    except EndpointError as error:
        return [str(error)]
    try:
        group.connect()
        group.checkpoint()
        group.connect()
    except EndpointError as error:
        said.append(str(error))
    group.close()
    return said


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_call_may_fail(driver: FakeDriver, harness: Harness, world: int) -> None:
    """The n-th call fails, for every n of a life: the error names it, and everything is given back except what the
    failed call was to give back."""
    assert whole_life(harness, world) == []
    calls = len(driver.log)
    failed: set[str] = set()
    for n in range(1, calls + 1):
        driver.reset()
        driver.fail_at(n, OUT_OF_MEMORY)
        said = whole_life(harness, world)
        call = driver.failed_call
        failed.add(call)
        where = f"call {n}, {call}: {said}, {driver.held}"
        assert driver.violations == [], where
        if said or call not in GIVES_BACK:  # a destructor says nothing
            assert len(said) == 1 and said[0].startswith(call) and "CUDA_ERROR_OUT_OF_MEMORY (2)" in said[0], where
        if call == "cuLogicalEndpointDestroy":  # its id still names an endpoint, so the range cannot be released
            assert len(driver.held) == world and sum(len(line.split()) > 2 for line in driver.held) == 1, where
            assert not any("bound" in line for line in driver.held), where
        elif call == "cuLogicalEndpointIdRelease":
            assert len(driver.held) == world and all(len(line.split()) == 2 for line in driver.held), where
        else:
            assert driver.held == [], where
    assert failed == {name for name in CALLS if "LogicalEndpoint" in name} - (
        {"cuLogicalEndpointImport"} if world == 1 else set()
    ) | {"cuDeviceGet"}
    driver.reset()


def test_suspend_says_what_failed_and_gives_back_the_rest(driver: FakeDriver, harness: Harness) -> None:
    group = Group(harness, 3)
    group.connect()
    driver.fail_at(1, SYSTEM_NOT_READY)
    with pytest.raises(EndpointError) as caught:
        group.ranks[0].suspend()
    assert str(caught.value) == f"cuLogicalEndpointUnbind failed: CUDA_ERROR_SYSTEM_NOT_READY (802){DAEMONS}"
    assert driver.held[0] == "id 1003 import"  # nothing of rank 0 is left
    driver.set(deinitialized=1)
    with pytest.raises(EndpointError, match=r"^cuLogicalEndpointUnbind failed: CUDA_ERROR_DEINITIALIZED \(4\)$"):
        group.ranks[1].suspend()  # the first of its failures
    group.close()
    driver.reset()


def test_a_failed_resume_can_be_tried_again(driver: FakeDriver, harness: Harness) -> None:
    group = Group(harness, 2)
    group.connect()
    for rank in group.ranks:
        rank.suspend()
    for n, call in enumerate(("IdReserve", "Create", "Query", "BindMem"), 1):
        driver.fail_at(n, NOT_PERMITTED)
        with pytest.raises(EndpointError, match=rf"{call} failed: CUDA_ERROR_NOT_PERMITTED \(800\); does this process"):
            group.ranks[0].resume(group.memories[0])
        assert driver.held == []
    for rank, memory in zip(group.ranks, group.memories, strict=True):
        rank.resume(memory)
    group.connect()
    group.close()


# A window over it: csrc/memory/cuda_vmm.cpp.


@pytest.fixture(scope="session")
def loaded_windows(built: Path, loaded: tuple[FakeDriver, Harness]) -> Windows:
    include = cuda_include()
    if include is None:
        pytest.skip("there is no cuda.h")
    build_windows(built, include)
    return Windows(built, loaded[0])


@pytest.fixture
def windows(loaded_windows: Windows, driver: FakeDriver) -> Iterator[Windows]:
    yield loaded_windows
    assert driver.mapped == []


class Peer:
    """Rank 0 of 2, which another process would be: memory and an endpoint, and the handle of both."""

    def __init__(self, harness: Harness, size: int) -> None:
        self.driver, self.memory = harness.driver, harness.driver.create_memory(size)
        self.endpoints = Endpoints(harness, self.memory, ep_size=2, window_bytes=size, physical_bytes=size)
        exported, memory = ctypes.create_string_buffer(64), ctypes.c_ulonglong(self.memory)
        assert self.driver.lib.cuMemExportToShareableHandle(exported, memory, 8, ctypes.c_ulonglong(0)) == 0
        self.exported = exported.raw + self.endpoints.handle()

    def handle(self, own: bytes) -> bytes:
        """Made from that of rank 1 (csrc/memory/cuda_peer.h): another process, and what it exports."""
        return bytes(byte ^ 0xFF for byte in own[:8]) + own[8:32] + self.exported

    def close(self) -> None:
        self.endpoints.close()
        self.driver.free_memory(self.memory)


def test_a_window_with_endpoints(driver: FakeDriver, harness: Harness, windows: Windows) -> None:
    peer = Peer(harness, 2 * ALIGNMENT)
    window = Window(windows, ALIGNMENT + 1, rank=1, ep_size=2)
    seen = []
    for n in range(3):
        own = window.handle()
        assert own[32 + 64 :] not in (bytes(64), peer.endpoints.handle())
        window.connect([peer.handle(own), own])
        seen.append(window.endpoints())
        base, number = seen[-1]
        assert number == base + 1
        assert driver.held[-2:] == [f"id {base} import", f"id {number} owner bound"]
        assert [line for line in driver.mapped if "range" in line] == [
            f"range {2 * ALIGNMENT} of memory {2 + n}", f"range {2 * ALIGNMENT} of memory 1"
        ]  # fmt: skip
        window.suspend()
        assert driver.held == ["id 1000 owner bound", "id 1001"]  # the peer's
        assert driver.mapped == ["memory 1", *[f"range {2 * ALIGNMENT}"] * 2]  # addresses are kept
        window.resume()
    assert len(set(map(tuple, seen))) == 3  # the ids differ
    window.close()
    peer.close()


def test_a_window_without_endpoints(driver: FakeDriver, windows: Windows) -> None:
    window = Window(windows, 1)
    window.connect([window.handle()])
    window.suspend()
    window.resume()
    window.connect([window.handle()])
    assert window.endpoints() == [] and window.handle()[32 + 64 :] == bytes(64)
    assert not [call for call in driver.log if "LogicalEndpoint" in call]
    window.close()


@pytest.mark.parametrize(("alignment", "granularity"), [(8, 2), (2, 8), (6, 4), (4, 6)])
def test_memory_suits_endpoint_and_allocation(
    driver: FakeDriver, windows: Windows, alignment: int, granularity: int
) -> None:
    driver.set(alignment=alignment << 20, granularity=granularity << 20)
    size = 1 + (5 << 20)
    window = Window(windows, size, ep_size=1)
    window.connect([window.handle()])
    bound = -(-size // (alignment << 20)) * (alignment << 20)
    created = -(-bound // (granularity << 20)) * (granularity << 20)
    assert f"cuMemCreate({created}, 8, 0)" in driver.log
    assert f"cuLogicalEndpointBindMem(1000, 0, 0, 1, 0, {bound}, 0)" in driver.log
    window.close()


def test_a_second_window_has_no_endpoints(driver: FakeDriver, windows: Windows) -> None:
    first = Window(windows, ALIGNMENT, ep_size=1)
    before = driver.held, driver.mapped
    driver.set(max_size=ALIGNMENT)
    with pytest.raises(EndpointError, match="this process has a window with logical endpoints"):
        Window(windows, 2 * ALIGNMENT, ep_size=1)
    assert (driver.held, driver.mapped) == before and len([c for c in driver.log if c.startswith("cuMemCreate")]) == 1
    second = Window(windows, ALIGNMENT)
    first.close()
    third = Window(windows, ALIGNMENT, ep_size=1)
    second.close()
    third.close()


def test_a_window_of_an_old_driver(driver: FakeDriver, windows: Windows) -> None:
    driver.set(version=13030)
    with pytest.raises(EndpointError, match="the driver does not export cuLogicalEndpointIdReserve"):
        Window(windows, ALIGNMENT, ep_size=1)
    Window(windows, ALIGNMENT).close()


def test_a_window_that_no_endpoint_can_span(driver: FakeDriver, windows: Windows) -> None:
    driver.set(max_size=ALIGNMENT)
    with pytest.raises(EndpointError, match="larger than a logical endpoint may be"):
        Window(windows, ALIGNMENT + 1, ep_size=1)
    assert not [call for call in driver.log if call.startswith("cuMemCreate")]


def life_of_a_window(harness: Harness, windows: Windows, fail_at: int = 0) -> str:
    """The first error, as a sentence; "" where there is none. ``fail_at``: counts the calls of the window."""
    peer = Peer(harness, ALIGNMENT)
    window = None
    if fail_at:
        harness.driver.fail_at(fail_at, OUT_OF_MEMORY)
    try:
        try:
            window = Window(windows, ALIGNMENT, rank=1, ep_size=2)
            for checkpoint in (False, True):
                if checkpoint:
                    window.suspend()
                    window.resume()
                own = window.handle()
                window.connect([peer.handle(own), own])
        except EndpointError as error:
            return str(error)
        return ""
    finally:
        if window is not None:
            window.close()
        peer.close()


def test_every_call_of_a_window_may_fail(driver: FakeDriver, harness: Harness, windows: Windows) -> None:
    """The n-th call fails, for every n: nothing is left behind and nothing is freed while it is in use."""
    assert life_of_a_window(harness, windows) == ""
    calls = [call.split("(")[0] for call in driver.log]
    of_window = calls[calls.index("cuLogicalEndpointExport") + 1 : -3]  # the peer's come before and after
    failed = set()
    for n, name in enumerate(of_window, 1):
        driver.reset()
        said = life_of_a_window(harness, windows, n)
        where = f"call {n}, {name}: {said}, {driver.held}, {driver.mapped}"
        assert driver.failed_call == name, where
        if name not in GIVES_BACK:  # else what it was to give back is left
            asks_version = name == "cuDriverGetVersion"
            assert ("does not export cuLogical" if asks_version else "CUDA_ERROR_OUT_OF_MEMORY") in said, where
            assert (driver.violations, driver.held, driver.mapped) == ([], [], []), where
        failed.add(name)
    everything = {name for name in CALLS if "LogicalEndpoint" in name} | {"cuMemCreate", "cuMemMap", "cuMemSetAccess"}
    assert everything <= failed
    driver.reset()


def test_a_failed_resume_of_a_window_can_be_tried_again(driver: FakeDriver, windows: Windows) -> None:
    window = Window(windows, ALIGNMENT, ep_size=1)
    window.connect([window.handle()])
    window.suspend()
    suspended = driver.held, driver.mapped
    before = len(driver.log)
    window.resume()
    calls = len(driver.log) - before
    window.suspend()
    for n in range(1, calls + 1):
        driver.fail_at(n, OUT_OF_MEMORY)
        with pytest.raises(EndpointError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            window.resume()
        assert (driver.held, driver.mapped) == suspended
    window.resume()
    window.connect([window.handle()])
    assert len(window.endpoints()) == 1
    window.close()


def test_a_window_whose_memory_cannot_be_unbound_keeps_it(
    driver: FakeDriver, harness: Harness, windows: Windows
) -> None:
    peer = Peer(harness, ALIGNMENT)
    window = Window(windows, ALIGNMENT, rank=1, ep_size=2)
    own = window.handle()
    window.connect([peer.handle(own), own])
    driver.fail_at(2, SYSTEM_NOT_READY)  # after the peer's memory is unmapped
    with pytest.raises(EndpointError, match="cuLogicalEndpointUnbind failed"):
        window.suspend()
    assert "memory 2" in driver.mapped
    window.suspend()
    assert "memory 2" not in driver.mapped
    window.resume()
    own = window.handle()
    window.connect([peer.handle(own), own])
    window.close()
    peer.close()


# The vote of the ranks.

REACHES = Reach(clique=7, owner_access=False, device="gpu 0", process="p 0")


def ranks_with(*changes: dict[str, object]) -> list[Reach]:
    return [
        REACHES._replace(**{"device": f"gpu {rank}", "process": f"p {rank}", **change})
        for rank, change in enumerate(changes)
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{}], []),
        ([{}, {}, {}], []),
        ([{}, {"clique": 8}, {}], ["rank 1: clique 8 of logical endpoints, rank 0 is in 7"]),
        (
            [{"clique": 8}, {}, {}],
            [f"rank {rank}: clique 7 of logical endpoints, rank 0 is in 8" for rank in (1, 2)],
        ),
        (
            [{}, {"device": "gpu 0"}, {}],
            [
                f"rank {rank}: one device with rank {other}, and it does not reach its own endpoints"
                for rank, other in ((0, 1), (1, 0))
            ],
        ),
        ([{"owner_access": True}, {"device": "gpu 0", "owner_access": True}], []),
        (
            [{"process": "p", "owner_access": True}, {}, {"process": "p", "owner_access": True}],
            [
                f"rank {rank}: one process with rank {other}, and a process has one window with an endpoint"
                for rank, other in ((0, 2), (2, 0))
            ],
        ),
    ],
)  # fmt: skip
def test_ranks_that_counted_writes_do_not_join(changes: list[dict[str, object]], expected: list[str]) -> None:
    assert counted_refusals(ranks_with(*changes)) == expected


def test_a_rank_votes_with_what_the_probe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def probe(device: int) -> dict[str, object]:
        asked.append(device)
        return {"reason": "there is none", "clique": 0, "owner_access": False}

    monkeypatch.setattr(_C, "counted_probe", probe, raising=False)
    params = MoEEpCommParams(8, 2, 4, 64)
    for cft, reason in ((None, "there is none"), (True, "there is none"), (False, "cft=False")):
        assert refusals(NVLinkOneSidedConfig(cft=cft), 2, params, 3)["cft"] == reason
    assert asked == [3, 3]


def test_reach_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"reason": "", "clique": 5, "owner_access": True}
    monkeypatch.setattr(_C, "counted_probe", lambda device: found, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid {device}"))
    mine = reach_of_counted_writes(3)
    assert mine == reach_of_counted_writes(3) == Reach(5, True, "uuid 3", mine.process)
    program = "from torch_moe_ep import nvlink_one_sided as n; print(n._process)"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert other and not mine.process.startswith(other) and mine.process.endswith(f"/{os.getpid()}")


# The end of a process.

EXIT = """
import ctypes, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from fake_driver import ALIGNMENT, Endpoints, FakeDriver, Harness
driver = FakeDriver(Path({built!r}))
harness = Harness(Path({built!r}), driver)
harness.load()
endpoints = Endpoints(harness, driver.create_memory(ALIGNMENT), shared=False)
endpoints.connect([endpoints.handle()])
endpoints.keep_until_exit()
driver.set(deinitialized={deinitialized})
print("exits", file=sys.stderr)
"""


@pytest.mark.parametrize("deinitialized", [0, 1])
def test_exit(built: Path, deinitialized: int) -> None:
    """Static destructors close the endpoints; a driver that has ended before them fails every call, and nobody dies."""
    program = EXIT.format(tests=str(HERE), built=str(built), deinitialized=deinitialized)
    done = subprocess.run(
        ["env", "FAKE_DRIVER_TRACE=1", sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.split("exits\n")[1].splitlines() == [
        f"cuLogicalEndpointUnbind(1000, 0, 0, {ALIGNMENT})",
        "cuLogicalEndpointDestroy(1000)",
        *([] if deinitialized else ["cuLogicalEndpointIdRelease(1000, 1)"]),
    ]


# The fake driver itself: what it must not let pass.


class Prop(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("device", ctypes.c_int), ("size", ctypes.c_ulonglong),
        ("handle_types", ctypes.c_uint), ("flags", ctypes.c_uint),
    ]  # fmt: skip


def prop(**changes: int) -> Prop:
    return Prop(**{"type": 1, "device": 0, "size": 2 * ALIGNMENT, "handle_types": 1, "flags": 1, **changes})


class Raw:
    """The driver's calls, in a state with ids 1000..1002, of which 1000 is an owner that is ready and 1001 its import;
    memory 1 is good, 2 cannot be exported."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.lib = driver, driver.lib
        base, ready = ctypes.c_uint32(), ctypes.c_int()
        driver.create_memory(2 * ALIGNMENT)
        driver.create_memory(2 * ALIGNMENT, fabric=False)
        self.handle = ctypes.create_string_buffer(64)
        assert self.lib.cuLogicalEndpointIdReserve(ctypes.byref(base), 3) == 0 and base.value == 1000
        assert self.create() == 0
        assert self.lib.cuLogicalEndpointQuery(1000, 1, ctypes.byref(ready)) == 0 and ready.value
        assert self.lib.cuLogicalEndpointExport(self.handle, 1000, 1) == 0
        assert self.lib.cuLogicalEndpointImport(1001, self.handle, 1) == 0
        assert self.lib.cuLogicalEndpointQuery(1001, 1, ctypes.byref(ready)) == 0 and ready.value
        assert driver.violations == []

    def create(self, number: int = 1000, **changes: int) -> int:
        return self.lib.cuLogicalEndpointCreate(number, ctypes.byref(prop(**changes)))

    def bind(self, number: int = 1000, device: int = 0, offset: int = 0, memory: int = 1, memory_offset: int = 0,
             size: int = ALIGNMENT, flags: int = 0) -> int:
        wide = [ctypes.c_uint64(value) for value in (offset, memory, memory_offset, size, flags)]
        return self.lib.cuLogicalEndpointBindMem(number, device, *wide)

    def unbind(self, number: int = 1000, device: int = 0, offset: int = 0, size: int = ALIGNMENT) -> int:
        return self.lib.cuLogicalEndpointUnbind(number, device, ctypes.c_uint64(offset), ctypes.c_uint64(size))

    def bind_before_ready(self) -> int:
        self.driver.set(queries=1)
        ready = ctypes.c_int(1)
        assert self.create(1002) == 0
        assert self.lib.cuLogicalEndpointQuery(1002, 1, ctypes.byref(ready)) == 0 and not ready.value
        return self.bind(1002)

    def bind_twice(self) -> int:
        assert self.bind(size=2 * ALIGNMENT) == 0
        return self.bind(offset=ALIGNMENT)

    def unbind_a_part(self) -> int:
        assert self.bind(size=2 * ALIGNMENT) == 0
        return self.unbind()

    def free_while_bound(self) -> int:
        assert self.bind() == 0
        self.driver.free_memory(1)
        return 1

    def limits(self, **changes: int) -> int:
        out = ctypes.c_uint64()
        return self.lib.cuLogicalEndpointGetLimits(
            ctypes.byref(out), ctypes.byref(out), ctypes.byref(prop(**changes))
        )

    def query(self, number: int, count: int = 1) -> int:
        return self.lib.cuLogicalEndpointQuery(number, count, ctypes.byref(ctypes.c_int()))


FORBIDDEN: list[tuple[str, Callable[[Raw], int]]] = [
    ("an id that names an endpoint was released", lambda d: d.lib.cuLogicalEndpointIdRelease(1000, 3)),
    ("an id that is not reserved was released", lambda d: d.lib.cuLogicalEndpointIdRelease(1002, 2)),
    ("create: the id names an endpoint", lambda d: d.create()),
    ("create: the id is not reserved", lambda d: d.create(1003)),
    ("the size is no multiple of the alignment", lambda d: d.create(1002, size=ALIGNMENT + 4096)),
    ("the size is above the maximum", lambda d: d.create(1002, size=2 << 40)),
    ("wrong flags", lambda d: d.create(1002, flags=0)),
    ("wrong flags", lambda d: d.limits(flags=3)),
    ("wrong handle types", lambda d: d.create(1002, handle_types=0)),
    ("the type is not unicast", lambda d: d.create(1002, type=2)),
    ("an endpoint of no device", lambda d: d.create(1002, device=8)),
    ("an endpoint of no bytes", lambda d: d.limits(size=0)),
    ("destroy: the id names no endpoint", lambda d: d.lib.cuLogicalEndpointDestroy(1002)),
    ("query: an id names no endpoint", lambda d: d.query(1000, 3)),
    ("bind: no query has said that the endpoint is ready", Raw.bind_before_ready),
    ("bind: bound already", Raw.bind_twice),
    ("bind: the endpoint is imported", lambda d: d.bind(1001)),
    ("bind: the id names no endpoint", lambda d: d.bind(1002)),
    ("bind: another device than the endpoint's", lambda d: d.bind(device=1)),
    ("bind: wrong flags", lambda d: d.bind(flags=1)),
    ("bind: misaligned", lambda d: d.bind(size=ALIGNMENT - 16)),
    ("bind: misaligned", lambda d: d.bind(offset=16)),
    ("bind: misaligned", lambda d: d.bind(memory_offset=16)),
    ("bind: the memory is none", lambda d: d.bind(memory=3)),
    ("bind: the memory cannot be exported", lambda d: d.bind(memory=2)),
    ("bind: beyond the memory", lambda d: d.bind(memory_offset=2 * ALIGNMENT)),
    ("bind: beyond the endpoint", lambda d: d.bind(offset=2 * ALIGNMENT)),
    ("unbind: not bound like that", lambda d: d.unbind()),
    ("unbind: not bound like that", Raw.unbind_a_part),
    ("unbind: no own endpoint", lambda d: d.unbind(1001)),
    ("export: the id names no endpoint", lambda d: d.lib.cuLogicalEndpointExport(d.handle, 1002, 1)),
    ("export: wrong handle type", lambda d: d.lib.cuLogicalEndpointExport(d.handle, 1000, 0)),
    ("import: the handle was never exported", lambda d: d.lib.cuLogicalEndpointImport(1002, bytes(64), 1)),
    ("import: the id names an endpoint", lambda d: d.lib.cuLogicalEndpointImport(1001, d.handle, 1)),
    ("import: the id is not reserved", lambda d: d.lib.cuLogicalEndpointImport(1003, d.handle, 1)),
    ("import: wrong handle type", lambda d: d.lib.cuLogicalEndpointImport(1002, d.handle, 0)),
    ("memory was freed while bound", Raw.free_while_bound),
    ("an attribute that nobody needs", lambda d: d.lib.cuDeviceGetAttribute(d.handle, 154, 0)),
]


@pytest.mark.parametrize(("sentence", "call"), FORBIDDEN, ids=[str(i) for i in range(len(FORBIDDEN))])
def test_the_fake_driver_refuses(driver: FakeDriver, sentence: str, call: Callable[[Raw], int]) -> None:
    assert call(Raw(driver)) == 1
    assert driver.violations == [sentence]
    driver.reset()


def test_an_import_outlives_its_owners_id(driver: FakeDriver) -> None:
    """The fake driver's endpoints live while any id names them, and destroying the owner's id unbinds."""
    raw = Raw(driver)
    assert raw.bind() == 0 and raw.lib.cuLogicalEndpointDestroy(1000) == 0
    driver.free_memory(1)
    assert driver.held == ["id 1000", "id 1001 import", "id 1002"]
    assert raw.lib.cuLogicalEndpointDestroy(1001) == 0 and raw.lib.cuLogicalEndpointIdRelease(1000, 3) == 0
