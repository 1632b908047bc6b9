"""Opening, sharing and closing windows; what ranks must agree on; masks."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import BY_NAME, Case, Step, backend_config, group_for, make_group, rank_mask
from ranks import Rank, RankPool

import torch_moe_ep
from torch_moe_ep import (
    _C,
    BootstrapConfig,
    MoEEpCommunication,
    StoreCommBackend,
    TorchDistributedCommBackend,
    create_communication,
    create_local_group,
    run_local_group,
)
from torch_moe_ep.bootstrap import WindowSpec

CASE = BY_NAME["plain"]


def run_steps(group: MoEEpCommunication, rank: int, device: Any, case: Case = CASE, seeds: int = 2) -> None:
    for seed in range(seeds):
        step = Step(case, group.ep_size, rank, seed, device)
        step.dispatch(group)
        step.combine(group)


def run_sharing(rank: Rank) -> None:
    def make(**options: Any) -> MoEEpCommunication:
        return make_group(options.pop("case", CASE), rank.world_size, rank.rank, rank.device, **options)

    a, b, own, other = make(), make(), make(namespace="own"), make(case=replace(CASE, hidden=128))
    assert a.comm == b.comm and a.order is b.order
    assert len({a.comm, own.comm, other.comm}) == 3
    # Timeouts are of the object, not of the window.
    assert make(timeout_sec=5).comm == a.comm
    first = a.comm
    a.destroy()
    a.destroy()
    run_steps(b, rank.rank, rank.device)
    assert first in _C.names()
    b.destroy()
    assert first in _C.names()  # the third user has not let go
    _C.close(first)
    _C.close(first)
    assert first not in _C.names()
    for group in (own, other):
        run_steps(group, rank.rank, rank.device)
        group.destroy()
        assert group.comm not in _C.names()
    again = make(namespace="again")
    assert again.comm != first
    run_steps(again, rank.rank, rank.device)
    again.destroy()


def test_equal_layouts_share_a_window() -> None:
    with RankPool(2) as pool:
        pool.run(run_sharing)


def run_create_after_destroy(rank: Rank) -> list[str]:
    names = []
    for _ in range(3):
        group = make_group(CASE, rank.world_size, rank.rank, rank.device)
        assert group.describe()["rounds"] == 0
        run_steps(group, rank.rank, rank.device)
        names.append(group.comm)
        group.destroy()
    return names


def test_create_after_destroy(ranks: Callable[[int], RankPool]) -> None:
    """Names are never used twice (graphs hold them), and are equal on all ranks (compiler caches hold them)."""
    names = ranks(3).run(run_create_after_destroy)
    assert len(set(names[0])) == 3 and names == [names[0]] * 3


def run_several_sizes(rank: Rank) -> None:
    cases = [CASE, BY_NAME["order_of_sums"], BY_NAME["bytes_with_odd_scales"], BY_NAME["top_32"]]
    groups = [make_group(case, rank.world_size, rank.rank, rank.device) for case in cases]
    try:
        steps = [Step(case, rank.world_size, rank.rank, 4, rank.device) for case in cases]
        for step, group in zip(steps, groups, strict=True):
            step.dispatch(group)
        for step, group in reversed(list(zip(steps, groups, strict=True))):
            step.combine(group)
    finally:
        for group in groups:
            group.destroy()


def test_several_communicators_at_once(ranks: Callable[[int], RankPool]) -> None:
    ranks(4).run(run_several_sizes)


# A field of which the last rank has another value, and the words for it.
DISAGREEMENTS = {
    "hidden_size": ({"hidden": 32}, "dispatch_row_bytes", "64", "128"),
    "capacity": ({"spare_capacity": 3}, "max_tokens", "7", "10"),
    "top_k": ({"top_k": 3}, "max_top_k", "2", "3"),
    "eplb_stats_num_experts": ({"eplb": 9}, "eplb_experts", "0", "9"),
    "enable_rank_mask": ({"masked": (1,)}, "enable_rank_mask", "False", "True"),
    "namespace": ({}, "namespace", "''", "'mine'"),
}


def run_disagreement(rank: Rank, name: str) -> str:
    change, *_ = DISAGREEMENTS[name]
    last = rank.rank == rank.world_size - 1
    before = _C.names()
    with pytest.raises(ValueError) as caught:
        make_group(
            replace(CASE, **change) if last else CASE, rank.world_size, rank.rank, rank.device,
            namespace="mine" if last and name == "namespace" else "",
        )
    assert _C.names() == before
    group = make_group(CASE, rank.world_size, rank.rank, rank.device)
    run_steps(group, rank.rank, rank.device, seeds=1)
    group.destroy()
    return str(caught.value)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_must_agree_about_sizes(ranks: Callable[[int], RankPool], name: str) -> None:
    _, field, usual, odd = DISAGREEMENTS[name]
    for rank, text in enumerate(ranks(4).run(run_disagreement, name)):
        mine, other, theirs = (usual, 3, odd) if rank < 3 else (odd, 0, usual)
        assert text.startswith(f"{field}: rank {rank} has {mine}, rank {other} has {theirs};"), text


def my_windows() -> list[str]:
    return glob.glob(f"/dev/shm/moe_ep_{os.getpid()}_*")


def run_too_large(rank: Rank, only_on: int | None) -> str:
    """All windows, or that of one rank alone, find no memory."""
    before = _C.names()
    case = CASE
    if only_on is None:
        # One row alone is larger than the whole of the shared memory.
        case = replace(CASE, dtype=torch.uint8, weights=None, hidden=shutil.disk_usage("/dev/shm").total + 2**20)
    real = _C.open

    def no_room(**options: Any) -> bytes:
        raise RuntimeError("no room for a window")

    if rank.rank == only_on:
        _C.open = no_room
    try:
        with pytest.raises(RuntimeError) as caught:
            make_group(case, rank.world_size, rank.rank, rank.device)
    finally:
        _C.open = real
    assert _C.names() == before and my_windows() == []
    group = make_group(CASE, rank.world_size, rank.rank, rank.device)
    run_steps(group, rank.rank, rank.device, seeds=1)
    group.destroy()
    return str(caught.value)


@pytest.mark.parametrize("only_on", [None, 0, 2])
def test_too_large_a_window_fails_on_all_ranks_alike(only_on: int | None) -> None:
    with RankPool(3) as pool:
        texts = pool.run(run_too_large, only_on)
    assert len(set(texts)) == 1 and "no room for a window" in texts[0], texts
    assert f"failed on {3 if only_on is None else 1} of 3 ranks" in texts[0]
    assert f"rank {only_on or 0}:" in texts[0]


def run_unmappable(rank: Rank) -> str:
    real = _C.connect

    def broken(name: str, handles: list[bytes], *rest: Any) -> None:
        real(name, [b"/moe_ep_gone" if r != rank.rank else handle for r, handle in enumerate(handles)], *rest)

    if rank.rank == 1:
        _C.connect = broken
    try:
        with pytest.raises(RuntimeError) as caught:
            make_group(CASE, rank.world_size, rank.rank, rank.device)
    finally:
        _C.connect = real
    assert my_windows() == []
    return str(caught.value)


def test_a_window_that_cannot_be_mapped_fails_on_all_ranks_alike() -> None:
    with RankPool(2) as pool:
        texts = pool.run(run_unmappable)
    assert len(set(texts)) == 1
    assert texts[0].startswith("connecting the windows") and "failed on 1 of 2 ranks" in texts[0]
    assert "rank 1:" in texts[0] and "cannot map the window of rank 0" in texts[0] and "one host" in texts[0]


def run_with_store(rank: Rank, path: str) -> None:
    store = dist.FileStore(path, rank.world_size)
    bootstrap = BootstrapConfig(rank.world_size, rank.rank, tcp_store=store)
    groups = []
    for case in (CASE, replace(CASE, hidden=64), CASE):  # one store serves any number of communicators
        groups.append(create_communication(bootstrap, case.params(2), backend_config(rank.device, timeout_sec=20)))
        run_steps(groups[-1], rank.rank, rank.device, case)
    assert groups[2].comm == groups[0].comm != groups[1].comm
    for group in groups:
        group.destroy()
    group = create_communication(bootstrap, CASE.params(2), backend_config(rank.device))
    run_steps(group, rank.rank, rank.device)
    group.destroy()


def test_handles_through_a_store(ranks: Callable[[int], RankPool]) -> None:
    with tempfile.TemporaryDirectory(prefix="moe_ep_store_") as directory:
        ranks(2).run(run_with_store, os.path.join(directory, "store"))


class CountingBackend:
    """An exchange of the user's own."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, 0

    def allgather(self, obj: Any) -> list[Any]:
        self.calls += 1
        return self.inner.allgather(obj)

    def barrier(self) -> None:
        self.inner.barrier()


def run_custom_backend(rank: Rank, path: str) -> None:
    for inner in (
        TorchDistributedCommBackend(),
        StoreCommBackend(dist.FileStore(path, rank.world_size), rank.rank, rank.world_size),
    ):
        inner.barrier()
        assert inner.allgather({"rank": rank.rank}) == [{"rank": r} for r in range(rank.world_size)]
        exchange = CountingBackend(inner)
        group = make_group(CASE, rank.world_size, rank.rank, rank.device, comm_backend=exchange)
        exchanged = exchange.calls
        assert exchanged > 0
        run_steps(group, rank.rank, rank.device)
        assert exchange.calls == exchanged  # steps need no exchange
        group.destroy()


def test_own_comm_backend(ranks: Callable[[int], RankPool]) -> None:
    with tempfile.TemporaryDirectory(prefix="moe_ep_store_") as directory:
        ranks(3).run(run_custom_backend, os.path.join(directory, "store"))


class ShortBackend(CountingBackend):
    def allgather(self, obj: Any) -> list[Any]:
        return super().allgather(obj)[:-1]


def run_short_backend(rank: Rank) -> None:
    with pytest.raises(ValueError, match="comm_backend: allgather returned 1 entries for world_size 2"):
        make_group(CASE, 2, rank.rank, rank.device, comm_backend=ShortBackend(TorchDistributedCommBackend()))


def test_comm_backend_of_another_size(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_short_backend)


def run_subgroups(rank: Rank) -> None:
    members = [[0, 2], [1, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = rank.rank % 2
    position = members[mine].index(rank.rank)
    # Another case per group, so that rows of the other group would show.
    case = replace(CASE, name=f"group {mine}", hidden=16 + 16 * mine)
    bootstrap = BootstrapConfig(2, position, process_group=groups[mine])
    group = create_communication(bootstrap, case.params(2), backend_config(rank.device, timeout_sec=20))
    everybody = make_group(CASE, 4, rank.rank, rank.device)
    for seed in range(4):
        small, large = Step(case, 2, position, seed, rank.device), Step(CASE, 4, rank.rank, seed, rank.device)
        small.dispatch(group)
        large.dispatch(everybody)
        small.combine(group)
        large.combine(everybody)
    group.destroy()
    everybody.destroy()
    with pytest.raises(ValueError, match=r"world_size=2, rank=\d is not what the process group says \(world size 4"):
        create_communication(BootstrapConfig(2, position), case.params(2), backend_config(rank.device))


def test_two_groups_of_two(ranks: Callable[[int], RankPool]) -> None:
    ranks(4).run(run_subgroups)


def test_bootstrap_without_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="torch.distributed is not initialised.*tcp_store"):
        create_communication(BootstrapConfig(2, 0), CASE.params(2), "shm_one_sided")
    group = create_communication(BootstrapConfig(1, 0), CASE.params(1), "shm_one_sided")  # alone needs nobody
    run_steps(group, 0, "cpu")
    group.destroy()


def run_describe(rank: Rank, w: int, c: int, h: int, k: int, extra: int, itemsize: int) -> None:
    """The formula of the design: C*B + C*min(K, W)*H*itemsize and the routing."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    case = Case("sizes", tokens=(c,), hidden=h, top_k=k, num_experts=64, dtype=dtype, scale=(torch.uint8, extra))
    group = make_group(case, w, rank.rank, rank.device)
    try:
        d = group.describe()
        row = h * itemsize + extra  # h and extra are multiples of 16 here
        assert d["stage_bytes"] == c * row
        assert d["landing_bytes"] == c * min(k, w) * h * itemsize
        # flags, headers and done words, and per peer and token K ids and weights; regions start on 128 bytes
        flags = 512 if rank.device.type == "cuda" else 1  # of a peer and parity: one per thread block
        least = w * (2 * 8 * flags + 8 + 2 * 64) + w * c * k * 8
        assert least <= d["routing_bytes"] < least + 8 * 128
        parts = (d[f"{part}_bytes"] for part in ("stage", "landing", "routing", "lamport", "counted"))
        assert group.window_bytes == d["window_bytes"] == sum(parts)
        assert (d["lamport_bytes"] > 0) == (d["lamport_max_tokens"] > 0)
        assert {key: d[key] for key in ("name", "rank", "ep_size", "device", "max_tokens_per_rank", "max_top_k")} == {
            "name": group.comm, "rank": rank.rank, "ep_size": w, "device": rank.device.type,
            "max_tokens_per_rank": c, "max_top_k": k,
        }
        assert d["rounds"] == 0 and d["last_error"] == "" and group.last_error() is None
        run_steps(group, rank.rank, rank.device, case, seeds=1)
        assert group.describe()["rounds"] == 2
    finally:
        group.destroy()


@pytest.mark.parametrize("sizes", [(64, 256, 8, 0, 2), (128, 64, 2, 16, 2), (8, 128, 1, 32, 4)])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_window_bytes(
    ranks: Callable[[int], RankPool], ep_size: int, sizes: tuple[int, int, int, int, int]
) -> None:
    ranks(ep_size).run(run_describe, ep_size, *sizes)


MASKED = replace(CASE, name="masked", tokens=(4, 5, 6), top_k=4, masked=(1,))
ALL = replace(MASKED, name="all", masked=())


def run_masks(rank: Rank) -> None:
    """Per call and kept, and back to all ranks."""
    group = make_group(MASKED, 3, rank.rank, rank.device)
    try:
        expected = rank_mask([0, 2], 3)
        assert expected is not None and torch.equal(group.active_rank_mask([0, 2]), expected)  # type: ignore[attr-defined]
        for seed in range(2):
            run_steps(group, rank.rank, rank.device, ALL, seeds=1)
            run_steps(group, rank.rank, rank.device, MASKED, seeds=1)
            group.set_active_ranks([0, 2])  # type: ignore[attr-defined]
            step = Step(MASKED, 3, rank.rank, seed, rank.device)
            step.mask = None
            step.dispatch(group)
            step.combine(group)
            step = Step(ALL, 3, rank.rank, seed, rank.device)
            step.mask = rank_mask([0, 1, 2], 3)  # a mask that is passed takes precedence over the one kept
            step.dispatch(group)
            step.combine(group)
            group.set_active_ranks([0, 1, 2])  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"active_ranks: expected ranks in 0..2, got 3"):
            group.set_active_ranks([3])  # type: ignore[attr-defined]
    finally:
        group.destroy()


def test_masks(ranks: Callable[[int], RankPool]) -> None:
    ranks(3).run(run_masks)


def run_no_masks(rank: Rank) -> None:
    group = make_group(CASE, 2, rank.rank, rank.device)
    try:
        with pytest.raises(ValueError, match="made without enable_rank_mask"):
            group.set_active_ranks([0])  # type: ignore[attr-defined]
        run_steps(group, rank.rank, rank.device)
    finally:
        group.destroy()


def test_set_active_ranks_needs_rank_masks(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_no_masks)


def run_survivors(rank: Rank, kept: bool) -> None:
    """Rank 1 dies; the others mask it and go on."""
    group = make_group(MASKED, 3, rank.rank, rank.device)
    step = Step(ALL, 3, rank.rank, 0, rank.device)
    step.dispatch(group)
    step.combine(group)
    dist.barrier()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kept:
        group.set_active_ranks([0, 2])  # type: ignore[attr-defined]
    for seed in range(5):
        step = Step(MASKED, 3, rank.rank, seed, rank.device)
        step.mask = None if kept else step.mask
        step.dispatch(group)
        step.combine(group)
    group.destroy()


@pytest.mark.parametrize("kept", [False, True])
def test_the_rest_go_on_without_a_killed_rank(kept: bool) -> None:
    with RankPool(3) as pool:
        outcomes = pool.outcomes(run_survivors, kept)
    assert [type(outcome).__name__ for outcome in outcomes] == ["NoneType", "RankError", "NoneType"], outcomes


def test_masks_of_several_words() -> None:
    """W = 70: two mask words, all ranks in threads of this process."""
    w = 70
    case = Case("70 ranks", tokens=(1,), top_k=3, num_experts=2 * w, hidden=4, masked=(2, 63, 64, 69))
    groups = create_local_group(w, case.params(w), backend_config("cpu", **case.options()))

    def one_rank(rank: int) -> None:
        step = Step(case, w, rank, 0)
        assert step.mask is not None and step.mask.shape == (2,)
        assert torch.equal(groups[rank].active_rank_mask(case.active(w)), step.mask)
        step.dispatch(groups[rank])
        step.combine(groups[rank])
        one_word = torch.ones(1, dtype=torch.uint64)
        with pytest.raises(ValueError, match="active_rank_mask: expected 2 words for ep_size 70, got 1"):
            torch_moe_ep.dispatch(
                group_for(case, groups[rank]), torch.zeros(1, 4),
                torch.zeros(1, 3, dtype=torch.int64), tokens_per_rank=1, active_rank_mask=one_word,
            )

    try:
        run_local_group(w, one_rank)
    finally:
        for group in groups:
            group.destroy()


def test_the_spec_names_every_size_a_window_depends_on() -> None:
    """A size missing from the spec would let two layouts share one window."""
    opened = set(_C.open.__doc__.replace("(", " ").replace(",", " ").split())
    sizes = {field for field in WindowSpec.__dataclass_fields__ if f"{field}:" in opened}
    assert sizes == {name.rstrip(":") for name in opened if name.endswith(":")} - {"name", "rank", "device_index"}
