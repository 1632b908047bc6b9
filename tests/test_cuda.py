"""What only a GPU can show: equality with the CPU column, graphs, programmatic launches, traps, masks under replay.

Ranks are a local group: all of them in this process, each with a stream, their ops issued by one thread. Collected
only where there is a GPU (conftest.py).
"""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from torch_moe_ep import (
    _C,
    MoEEpCommParams,
    MoEEpCommunication,
    NVLinkOneSidedConfig,
    ShmOneSidedConfig,
    combine,
    create_local_group,
    dispatch,
    run_local_group,
)


class Ranks:
    """A local group on one GPU: W communicators and their streams."""

    def __init__(self, ep_size: int, params: MoEEpCommParams, **options: Any) -> None:
        low_precision_scales = options.pop("low_precision_scales", True)
        private = {"low_precision_scales": low_precision_scales, "_emulate_cft": options.pop("_emulate_cft", False)}
        config = NVLinkOneSidedConfig(timeout_sec=20, **{"lamport": False, **options})
        self.groups = create_local_group(ep_size, params, config, **private)
        self.streams = [torch.cuda.Stream() for _ in range(ep_size)]
        for stream in self.streams:  # an allocation inside the driver could wait for a kernel that waits for a peer
            with torch.cuda.stream(stream):
                torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def each(self, function: Any) -> list[Any]:
        """``function(rank, group)`` on the stream of every rank, in turn."""
        out = []
        for rank, (group, stream) in enumerate(zip(self.groups, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                out.append(function(rank, group))
        return out

    def join(self) -> None:
        torch.cuda.synchronize()


@contextmanager
def ranks_of(ep_size: int, params: MoEEpCommParams, **options: Any) -> Iterator[Ranks]:
    ranks = Ranks(ep_size, params, **options)
    try:
        yield ranks
    finally:
        torch.cuda.synchronize()
        for group in ranks.groups:
            group.destroy()


def inputs(ranks: int, t: int, h: int, k: int, e: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(t, h, generator=g).to(dtype).cuda(), torch.randint(-1, e + 1, (t, k), generator=g).cuda())
        for _ in range(ranks)
    ]


def copies(ids: torch.Tensor, e: int, w: int) -> torch.Tensor:
    """[T, 1]: the distinct ranks that own a token's ids (E divides by W)."""
    valid = (ids >= 0) & (ids < e)
    owners = torch.where(valid, ids.clamp(0, e - 1) // (e // w), w)
    return torch.nn.functional.one_hot(owners.long(), w + 1).amax(1)[:, :w].sum(1, keepdim=True)


def echo(group: MoEEpCommunication, x: torch.Tensor, ids: torch.Tensor, r: int | None = None) -> torch.Tensor:
    """combine(dispatch(x)): every token times its number of target ranks."""
    received = dispatch(group, x, ids, tokens_per_rank=r)
    return combine(group, received.hidden_states, received.routing, num_tokens=len(x))


def check_echo(out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, e: int, w: int) -> None:
    assert torch.equal(out, (x.float() * copies(ids, e, w)).to(x.dtype))


def check_echoes(ranks: Ranks, data: list[Any], e: int, r: int | None = None) -> None:
    """An eager dispatch and combine on every rank."""
    ranks.join()
    outs = ranks.each(lambda rank, group: echo(group, *data[rank], r))
    ranks.join()
    for rank, out in enumerate(outs):
        check_echo(out, *data[rank], e, len(outs))


@pytest.mark.parametrize("wire", ["rows", "fp8", "fp8_plain"])
@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_combine_equals_the_cpu_column(ep_size: int, wire: str) -> None:
    t, h, k, e = 19, 1000, 6, 24
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        params = MoEEpCommParams(e, k, t, h, dtype=dtype)
        g = torch.Generator().manual_seed(ep_size)
        ids = [torch.rand(t, e, generator=g).topk(k, dim=1).indices for _ in range(ep_size)]
        rows = [torch.randn(ep_size * t, h, generator=g).to(dtype) * 2.0 ** (r - 3) for r in range(ep_size)]
        options = {"use_low_precision_combine": wire != "rows"}
        scales = wire != "fp8_plain"
        cpu = create_local_group(ep_size, params, ShmOneSidedConfig(**options), low_precision_scales=scales)

        def on_cpu(r: int) -> torch.Tensor:
            received = dispatch(cpu[r], torch.zeros(t, h, dtype=dtype), ids[r])  # noqa: B023
            return combine(cpu[r], rows[r], received.routing, num_tokens=t)  # noqa: B023

        expected = run_local_group(ep_size, on_cpu)
        with ranks_of(ep_size, params, low_precision_scales=scales, **options) as ranks:
            device_ids, device_rows = [i.cuda() for i in ids], [x.cuda() for x in rows]
            zeros = torch.zeros(t, h, dtype=dtype, device="cuda")
            ranks.join()
            received = ranks.each(lambda r, group: dispatch(group, zeros, device_ids[r]))  # noqa: B023
            outs = ranks.each(
                lambda r, group: combine(group, device_rows[r], received[r].routing, num_tokens=t)  # noqa: B023
            )
            ranks.join()
            for out, want in zip(outs, expected, strict=True):
                assert torch.equal(out.cpu(), want), (dtype, wire)
        for group in cpu:
            group.destroy()


def test_many_rounds_of_random_sizes_with_a_rank_held_up() -> None:
    w, c, h, k, e, rounds = 4, 24, 512, 4, 16, 10_000
    source = random.Random(5)
    pool = [inputs(w, c, h, k, e, seed) for seed in range(8)]
    expected = [[(x.float() * copies(ids, e, w)).to(x.dtype) for x, ids in data] for data in pool]
    with ranks_of(w, MoEEpCommParams(e, k, c, h)) as ranks:
        wrong = torch.zeros(w, dtype=torch.int64, device="cuda")
        for i in range(rounds):
            if i % 50 == 0:
                ranks.join()
                late = source.randrange(w)
                for r, group in enumerate(ranks.groups):
                    for point in ("before_put", "before_flag", "after_flags"):
                        _C.set_delay(group.comm, point, source.choice([0, 5, 20]) if r == late else 0)
            data = pool[i % len(pool)]
            r_step = source.randint(1, c)
            tokens = [source.randint(0, r_step) for _ in range(w)]

            def step(r: int, group: MoEEpCommunication) -> None:
                x, ids = (a[: tokens[r]] for a in data[r])  # noqa: B023
                out = echo(group, x, ids, r_step)  # noqa: B023
                wrong[r] += (out != expected[i % len(pool)][r][: tokens[r]]).sum()  # noqa: B023

            ranks.each(step)
        ranks.join()
        assert wrong.tolist() == [0] * w
        assert ranks.groups[0].describe()["rounds"] == 2 * rounds


def test_dispatches_in_a_row_never_overwrite_what_a_held_up_rank_still_reads() -> None:
    w, t, h, k, e = 2, 8, 256, 2, 4
    with ranks_of(w, MoEEpCommParams(e, k, t, h)) as ranks:
        _C.set_delay(ranks.groups[1].comm, "after_flags", 300)
        data = [inputs(w, t, h, k, e, seed) for seed in range(6)]
        ranks.join()
        received = [ranks.each(lambda r, group: dispatch(group, *d[r])) for d in data]  # noqa: B023
        outs = [
            ranks.each(lambda r, group: combine(group, got[r].hidden_states, got[r].routing, num_tokens=t))  # noqa: B023
            for got in received
        ]
        ranks.join()
        for d, out in zip(data, outs, strict=True):
            for r in range(w):
                check_echo(out[r], *d[r], e, w)


@pytest.mark.parametrize("point", ["before_put", "before_flag", "after_flags"])
def test_long_waits_are_no_disagreement(point: str) -> None:
    """A wait that outlasts a few thousand polls compares headers, in every block; ranks that agree must go on."""
    w, t, h, k, e = 4, 64, 4096, 4, 16
    with ranks_of(w, MoEEpCommParams(e, k, t, h)) as ranks:
        _C.set_delay(ranks.groups[2].comm, point, 20_000)
        data = inputs(w, t, h, k, e, 1)
        for _ in range(3):
            check_echoes(ranks, data, e)
            for group in ranks.groups:
                assert group.last_error() is None  # type: ignore[attr-defined]


def capture(ranks: Ranks, record: Any) -> torch.cuda.CUDAGraph:
    """A graph in which ``record(rank, group)`` of every rank is a branch."""
    graph = torch.cuda.CUDAGraph()
    ranks.join()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for stream in ranks.streams:
            stream.wait_stream(main)
        ranks.each(record)
        for stream in ranks.streams:
            main.wait_stream(stream)
    return graph


def test_graphs_of_several_sizes_replay_in_any_order_mixed_with_eager() -> None:
    w, c, h, k, e = 3, 32, 384, 4, 12
    source = random.Random(3)
    with ranks_of(w, MoEEpCommParams(e, k, c, h)) as ranks:
        graphs = []
        for t in (1, 7, 32):  # the first use of these communicators is inside a capture
            data = inputs(w, t, h, k, e, t)
            outs: dict[int, torch.Tensor] = {}

            def record(r: int, group: MoEEpCommunication) -> None:
                outs[r] = echo(group, *data[r], len(data[r][0]))  # noqa: B023

            graphs.append((capture(ranks, record), data, outs))
        for _ in range(40):
            graph, data, outs = source.choice(graphs)
            fresh = inputs(w, len(data[0][0]), h, k, e, source.randrange(1000))
            for (x, ids), (new_x, new_ids) in zip(data, fresh, strict=True):
                x.copy_(new_x)
                ids.copy_(new_ids)
            for out in outs.values():
                out.fill_(torch.nan)
            ranks.join()
            graph.replay()
            ranks.join()
            for r in range(w):
                check_echo(outs[r], *data[r], e, w)
            if source.random() < 0.5:
                data = inputs(w, 5, h, k, e, source.randrange(1000))
                check_echoes(ranks, data, e, 9)


def test_active_ranks_are_seen_by_replays() -> None:
    w, t, h, k, e = 3, 4, 128, 3, 3
    with ranks_of(w, MoEEpCommParams(e, k, t, h), enable_rank_mask=True) as ranks:
        ids = torch.arange(3, device="cuda").expand(t, k)
        x = torch.ones(t, h, device="cuda", dtype=torch.bfloat16)
        outs: dict[int, torch.Tensor] = {}

        def record(r: int, group: MoEEpCommunication) -> None:
            outs[r] = echo(group, x, ids)

        graph = capture(ranks, record)
        for active in ([0, 1, 2], [0, 2], [0, 1, 2], [1]):
            for group in ranks.groups:
                group.set_active_ranks(active)  # type: ignore[attr-defined]
            graph.replay()
            ranks.join()
            for r in range(w):
                assert (outs[r] == (len(active) if r in active else 0)).all(), (active, r)


@pytest.mark.parametrize("pdl", [None, True, False])
def test_neighbours_with_and_without_programmatic_launches(pdl: bool | None) -> None:
    """Inductor's kernels before and after the ops, with its own switch on and off."""
    import torch._inductor.config as inductor

    w, t, h, k, e = 1, 64, 512, 4, 8
    for neighbours in (False, True):
        torch._dynamo.reset()
        with ranks_of(w, MoEEpCommParams(e, k, t, h, dtype=torch.float32), enable_pdl=pdl) as ranks:
            group = ranks.groups[0]

            @torch.compile(fullgraph=True, mode="max-autotune-no-cudagraphs" if neighbours else None)
            def model(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
                for _ in range(4):
                    x = torch.tanh(x * 2 + 1)
                    x = echo(group, x, ids)  # noqa: B023
                    x = torch.sin(x) - x.mean(dim=1, keepdim=True)
                return x

            def plain(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
                for _ in range(4):
                    x = torch.tanh(x * 2 + 1)
                    x = (x.float() * copies(ids, e, w)).to(x.dtype)
                    x = torch.sin(x) - x.mean(dim=1, keepdim=True)
                return x

            (x, ids), = inputs(w, t, h, k, e, 9, torch.float32)
            with inductor.patch({"triton.enable_pdl": neighbours}):
                for _ in range(3):
                    got = model(x, ids)
            torch.testing.assert_close(got, plain(x, ids), rtol=1e-4, atol=1e-4)


def test_reduce_overhead_mode() -> None:
    w, t, h, k, e = 1, 16, 256, 2, 4
    torch._dynamo.reset()
    with ranks_of(w, MoEEpCommParams(e, k, t, h)) as ranks:
        group = ranks.groups[0]

        @torch.compile(fullgraph=True, mode="reduce-overhead")
        def model(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return echo(group, x * 2, ids) + 1

        before = group.describe()["rounds"]
        for seed in range(6):
            (x, ids), = inputs(w, t, h, k, e, seed)
            torch.compiler.cudagraph_mark_step_begin()
            got = model(x, ids).clone()
            torch.testing.assert_close(got, ((x * 2).float() * copies(ids, e, w)).to(x.dtype) + 1)
        assert group.describe()["rounds"] == before + 12  # nothing ran twice, nothing was left out


@pytest.mark.parametrize("w", [2, 4])
def test_checkpoint_keeps_addresses_and_graphs(w: int) -> None:
    t, h, k, e = 6, 256, 2, 8
    with ranks_of(w, MoEEpCommParams(e, k, t, h)) as ranks:
        data = inputs(w, t, h, k, e, 1)
        outs: dict[int, torch.Tensor] = {}

        def record(r: int, group: MoEEpCommunication) -> None:
            outs[r] = echo(group, *data[r])

        graph = capture(ranks, record)
        graph.replay()
        ranks.join()
        run_local_group(w, lambda r: ranks.groups[r].checkpoint_prepare())  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="is not connected"):
            echo(ranks.groups[0], *data[0])
        run_local_group(w, lambda r: ranks.groups[r].checkpoint_restore())  # type: ignore[attr-defined]
        for r in range(w):
            outs[r].fill_(torch.nan)
        ranks.join()
        graph.replay()
        ranks.join()
        for r in range(w):
            check_echo(outs[r], *data[r], e, w)


def test_ranks_that_disagree_are_told_and_go_on() -> None:
    w, t, h, k, e = 2, 8, 2048, 2, 4
    with ranks_of(w, MoEEpCommParams(e, k, t, h)) as ranks:
        data = inputs(w, 2, h, k, e, 1)
        ranks.join()
        ranks.each(lambda r, group: dispatch(group, *data[r], tokens_per_rank=2 + 6 * r))
        ranks.join()
        for r, group in enumerate(ranks.groups):
            values = f"rank {r} has {2 + 6 * r}, rank {1 - r} has {8 - 6 * r}"
            assert "disagree about tokens_per_rank" in (group.last_error() or "")  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match=values):
                dispatch(group, *data[r])
        check_echoes(ranks, data, e)


TRAP = """
    import torch, torch_moe_ep
    from torch_moe_ep import MoEEpCommParams, NVLinkOneSidedConfig, create_local_group, dispatch
    groups = create_local_group(2, MoEEpCommParams(4, 2, 8, 64), NVLinkOneSidedConfig(timeout_sec=1, lamport=False))
    x = torch.zeros(3, 64, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(3, 2, device="cuda", dtype=torch.int64)
    torch.cuda.synchronize()
    def call():
        dispatch(groups[1], x, ids)  # rank 0 never comes
    if {captured}:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        groups[1].timeout_sec = groups[1].config.timeout_sec = 3600  # the graph keeps what it was captured with
        call = graph.replay
    call()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("synchronize:", type(error).__name__)
    print("last_error:", groups[1].last_error())
    try:
        dispatch(groups[1], x, ids)
    except RuntimeError as error:
        print("next call:", error)
"""


@pytest.mark.parametrize("captured", [False, True])
def test_deadline_traps_and_leaves_a_sentence(captured: bool) -> None:
    program = textwrap.dedent(TRAP).format(captured=captured)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    sentence = "dispatch round 1 on rank 1 of communicator"
    for line in ("last_error", "next call"):
        found = [text for text in done.stdout.splitlines() if text.startswith(line)]
        assert found and sentence in found[0] and "waited 1 s (timeout_sec) for rank 0: no flag came" in found[0], done


@pytest.mark.parametrize("memory", ["posix_fd", "cuda_ipc"])
def test_every_kind_of_memory(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_moe_ep import nvlink_one_sided

    monkeypatch.setattr(nvlink_one_sided, "MEMORY_KINDS", (memory,))
    w, t, h, k, e = 2, 4, 64, 2, 4
    with ranks_of(w, MoEEpCommParams(e, k, t, h)) as ranks:
        assert ranks.groups[0].describe()["memory"] == memory
        data = inputs(w, t, h, k, e, 1)
        check_echoes(ranks, data, e)


def test_a_kind_of_memory_that_no_rank_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_moe_ep import nvlink_one_sided

    monkeypatch.setattr(nvlink_one_sided, "MEMORY_KINDS", ("papyrus",))
    with pytest.raises(ValueError, match="allocating the windows .papyrus. failed on 2 of 2 ranks"):
        create_local_group(2, MoEEpCommParams(4, 2, 4, 64), NVLinkOneSidedConfig())


def test_rows_beyond_four_gib_of_offsets() -> None:
    w, t, h, k, e = 1, 70_000, 16 * 1024, 1, 1  # 4.6 GB of float32 rows
    with ranks_of(w, MoEEpCommParams(e, k, t, h, dtype=torch.float32)) as ranks:
        x = torch.empty(t, h, device="cuda").copy_(torch.arange(t, device="cuda").float()[:, None].expand(t, h))
        ids = torch.zeros(t, 1, device="cuda", dtype=torch.int32)
        assert torch.equal(echo(ranks.groups[0], x, ids), x)


def test_transports_that_are_off_say_why() -> None:
    with ranks_of(2, MoEEpCommParams(4, 2, 4, 64), lamport=False) as ranks:
        group = ranks.groups[1]
        assert not group.lamport_enabled and not group.cft_enabled  # type: ignore[attr-defined]
        assert group.transport_refusals["lamport"][0] == "rank 0: lamport=False"  # type: ignore[attr-defined]
