"""Counted writes on a GPU, emulated: equal bits, graphs, any order of rounds, masks, traps; and their model's search.

test_rows.py, test_protocol.py and the like run them too, in processes, with ``--transport counted``.
"""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from test_cuda import check_echo, copies, echo, inputs, ranks_of
from test_lamport_cuda import run_step

from torch_moe_ep import (
    _C,
    MoEEpCommParams,
    MoEEpCommunication,
    NVLinkOneSidedConfig,
    QuantFormat,
    combine,
    create_local_group,
    dispatch,
    quantize,
    run_local_group,
)

ON: dict[str, Any] = {"cft": True, "_emulate_cft": True}
FORMATS = [None, QuantFormat.MXFP8, QuantFormat.DeepSeekFp8, QuantFormat.NVFP4]


@pytest.mark.parametrize("hidden", [64, 1024, 7168])
@pytest.mark.parametrize("dispatch_format", FORMATS, ids=lambda f: f.name if f else "BF16")
@pytest.mark.parametrize("ep_size", [2, 3, 8])
def test_equals_the_fence_and_the_cpu_column(ep_size: int, dispatch_format: QuantFormat | None, hidden: int) -> None:
    """Rows whose bytes are no multiple of 16 (here: scales of 2 and 56 bytes) take the fence."""
    e, k, c = 21, 5, 40
    params = MoEEpCommParams(e, k, c, hidden, dispatch_format=dispatch_format)
    with ranks_of(ep_size, params, **ON) as on, ranks_of(ep_size, params, cft=False) as off:
        assert all(g.cft_enabled for g in on.groups) and not any(g.cft_enabled for g in off.groups)  # type: ignore[attr-defined]
        cpu = create_local_group(ep_size, params)
        for seed, r in enumerate((c, 1, 4, c)):
            g = torch.Generator().manual_seed(seed)
            args = []
            for rank in range(ep_size):
                t = [r, 0, r - 1][rank % 3]
                x, scale = torch.randn(t, hidden, generator=g).bfloat16(), None
                if dispatch_format:
                    x, scale = quantize(x, dispatch_format)
                    x = x.view(torch.uint8)
                    if scale is not None:  # a lone column may have any stride, which a view of bytes refuses
                        scale = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)
                ids = torch.randint(-1, e + 2, (t, k), generator=g)
                rows = torch.randn(ep_size * r, hidden, generator=g).bfloat16()
                args.append((x, ids, torch.rand(t, k, generator=g), scale, rows))
            moved = [tuple(a if a is None else a.cuda() for a in of_rank) for of_rank in args]
            expected = run_local_group(ep_size, lambda rank: run_step(cpu[rank], args[rank], r))  # noqa: B023
            for ranks in (on, off):
                got = run_local_group(ep_size, lambda rank: run_step(ranks.groups[rank], moved[rank], r))  # noqa: B023
                for mine, theirs in zip(got, expected, strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        for group in cpu:
            group.destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_combine_of_every_dtype_and_top_k(dtype: torch.dtype) -> None:
    for ep_size, k, e, hidden in ((2, 1, 2, 48), (4, 22, 30, 136), (8, 32, 40, 2056)):
        params = MoEEpCommParams(e, k, 5, hidden, dtype=dtype)
        cpu = create_local_group(ep_size, params)
        with ranks_of(ep_size, params, **ON) as ranks:
            g = torch.Generator().manual_seed(k)
            args = [
                (torch.randn(5, hidden, generator=g).to(dtype), torch.randint(-1, e + 1, (5, k), generator=g),
                 torch.rand(5, k, generator=g).to(dtype), None, torch.randn(ep_size * 5, hidden, generator=g).to(dtype))
                for _ in range(ep_size)
            ]
            moved = [tuple(a if a is None else a.cuda() for a in of_rank) for of_rank in args]
            expected = run_local_group(ep_size, lambda rank: run_step(cpu[rank], args[rank], 5))  # noqa: B023
            got = run_local_group(ep_size, lambda rank: run_step(ranks.groups[rank], moved[rank], 5))  # noqa: B023
            for mine, theirs in zip(got, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        for group in cpu:
            group.destroy()


def test_rows_from_any_address() -> None:
    w, t, h, k, e = 2, 5, 96, 2, 4
    with ranks_of(w, MoEEpCommParams(e, k, t, h), **ON) as ranks:
        for shift in (1, 4):
            data = inputs(w, t, h, k, e, shift)
            wide = [torch.zeros(t, h + 8, device="cuda").bfloat16() for _ in range(w)]
            for (x, _), into in zip(data, wide, strict=True):
                into[:, shift : shift + h] = x
            torch.cuda.synchronize()
            outs = ranks.each(lambda rank, g: echo(g, wide[rank][:, shift : shift + h], data[rank][1]))  # noqa: B023
            ranks.join()
            for rank in range(w):
                check_echo(outs[rank], *data[rank], e, w)


def test_10_000_rounds_of_random_sizes_with_a_rank_held_up() -> None:
    """Graphs of random sizes, each with dispatches and combines in any order, replayed at random among eager steps.
    Ranks are held up between flag and rows, and elsewhere; results are compared inside the graphs."""
    w, h, k, e, c = 4, 192, 4, 16, 9
    rng = random.Random(6)
    with ranks_of(w, MoEEpCommParams(e, k, c, h), **ON) as ranks:
        wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(w)]
        graphs = []
        points = ("before_put", "before_flag", "before_rows", "after_flags")
        for n in range(16):
            for g in ranks.groups:
                for point in points:
                    _C.set_delay(g.comm, point, rng.choice([0, 0, 0, 3, 20]) if n % 2 else 0)
            t = rng.randint(1, c)
            data = inputs(w, t, h, k, e, n)
            expected = [(x.float() * copies(ids, e, w)).to(x.dtype) for x, ids in data]
            graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            pattern = rng.choice(["dc", "ddcc", "dcdc", "dddccc"])
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=main):
                for rank, (group, stream) in enumerate(zip(ranks.groups, ranks.streams, strict=True)):
                    stream.wait_stream(main)
                    with torch.cuda.stream(stream):
                        kept = []
                        for op in pattern:
                            if op == "d":
                                kept.append(dispatch(group, *data[rank], tokens_per_rank=t))
                            else:
                                got = kept.pop(0)
                                out = combine(group, got.hidden_states, got.routing, num_tokens=t)
                                wrong[rank] += (out != expected[rank]).any()
                for stream in ranks.streams:
                    main.wait_stream(stream)
            graphs.append((graph, len(pattern), data, expected))  # a graph reads both at every replay
        for g in ranks.groups:
            for point in points:
                _C.set_delay(g.comm, point, 0)
        done = 0
        while done < 10_000:
            graph, rounds, *_ = rng.choice(graphs)
            graph.replay()
            done += rounds
            if rng.random() < 0.01:
                data = inputs(w, c, h, k, e, done)
                torch.cuda.synchronize()
                outs = ranks.each(lambda rank, g: echo(g, *data[rank]))  # noqa: B023
                torch.cuda.synchronize()
                for rank in range(w):
                    check_echo(outs[rank], *data[rank], e, w)
        torch.cuda.synchronize()
        assert [int(count) for count in wrong] == [0] * w


def test_steps_of_all_transports_in_any_order() -> None:
    w, h, k, e, c = 4, 256, 3, 8, 40
    rng = random.Random(2)
    limits = {"cft_max_tokens_for_dispatch": 20, "cft_max_tokens_for_combine": 30}
    with ranks_of(
        w, MoEEpCommParams(e, k, c, h), lamport=None, lamport_max_tokens=7, _emulate_cft=True, **limits
    ) as ranks:
        described = ranks.groups[0].describe()  # type: ignore[attr-defined]
        assert [described[f"counted_max_tokens_for_{op}"] for op in ("dispatch", "combine")] == [20, 30]
        for seed in range(300):
            r = rng.choice([1, 7, 8, 20, 25, 40])  # Lamport; counted; combine alone counted; the fence
            data = inputs(w, rng.randint(0, r), h, k, e, seed)
            kept = ranks.each(lambda rank, g: dispatch(g, *data[rank], tokens_per_rank=r))  # noqa: B023
            if rng.random() < 0.3:
                other = rng.choice([20, 40])
                ranks.each(lambda rank, g: dispatch(g, *data[rank][:2], tokens_per_rank=max(r, other)))  # noqa: B023
            outs = ranks.each(
                lambda rank, g: combine(g, kept[rank].hidden_states, kept[rank].routing, num_tokens=len(data[rank][0]))  # noqa: B023
            )
            ranks.join()
            for rank in range(w):
                check_echo(outs[rank], *data[rank], e, w)


def test_masked_ranks_leave_no_trace() -> None:
    w, h, k, e, c = 3, 64, 3, 6, 5
    with ranks_of(w, MoEEpCommParams(e, k, c, h), enable_rank_mask=True, **ON) as ranks:
        data = inputs(w, c, h, k, e, 0)
        for active in ([0, 1, 2], [0, 2], [0, 1, 2], [0], [0, 1, 2]):
            for g in ranks.groups:
                g.set_active_ranks(active)  # type: ignore[attr-defined]
            outs = ranks.each(lambda rank, g: echo(g, *data[rank]))
            ranks.join()
            for rank in active:
                x, ids = data[rank]
                valid = (ids >= 0) & (ids < e)
                owners = torch.where(valid, ids.clamp(0, e - 1) // (e // w), w)
                counts = torch.nn.functional.one_hot(owners.long(), w + 1).amax(1)[:, active].sum(1, keepdim=True)
                assert torch.equal(outs[rank], (x.float() * counts).bfloat16())


@pytest.mark.parametrize("what", ["tokens_per_rank", "another transport", "another op"])
def test_ranks_that_disagree_are_told_and_go_on(what: str) -> None:
    """Totals and counters move alike in such a round: later rounds are right."""
    w, h, k, e, c = 2, 64, 2, 4, 16
    with ranks_of(w, MoEEpCommParams(e, k, c, h), _emulate_cft=True, cft_max_tokens_for_dispatch=8) as ranks:
        x, ids = inputs(1, 4, h, k, e, 1)[0]
        other = {"tokens_per_rank": 6, "another transport": 12, "another op": 4}[what]

        def odd(rank: int, g: MoEEpCommunication) -> None:
            if rank == 1 and what == "another op":
                routing = torch.full((1 + w + 2, 4), -1, dtype=torch.int32, device="cuda")
                combine(g, torch.zeros(w * 4, h, device="cuda").bfloat16(), routing, num_tokens=4)
            else:
                dispatch(g, x, ids, tokens_per_rank=4 if rank == 0 else other)

        ranks.each(odd)
        ranks.join()
        for rank, g in enumerate(ranks.groups):
            with pytest.raises(RuntimeError, match="the op" if what == "another op" else "tokens_per_rank") as caught:
                dispatch(g, x, ids)
            assert f"rank {rank} has" in str(caught.value) and f"rank {1 - rank} has" in str(caught.value)
        for r in (4, 8, 16):
            outs = ranks.each(lambda rank, g: echo(g, x, ids, r))  # noqa: B023
            ranks.join()
            for out in outs:
                check_echo(out, x, ids, e, w)


def test_rows_that_do_not_come_end_in_a_sentence() -> None:
    """Rank 1 is held up between its flag and its rows for longer than rank 0 waits."""
    program = textwrap.dedent("""
        import torch
        from torch_moe_ep import _C, MoEEpCommParams, NVLinkOneSidedConfig, create_local_group, dispatch
        config = NVLinkOneSidedConfig(timeout_sec=1, lamport=False, cft=True)
        groups = create_local_group(2, MoEEpCommParams(4, 2, 8, 64), config, _emulate_cft=True)
        assert groups[0].cft_enabled
        x = torch.zeros(3, 64, device="cuda").bfloat16()
        ids = torch.zeros(3, 2, device="cuda", dtype=torch.int32)
        streams = [torch.cuda.Stream() for _ in groups]
        torch.cuda.synchronize()
        _C.set_delay(groups[1].comm, "before_rows", 5_000_000)
        for group, stream in zip(groups, streams):
            with torch.cuda.stream(stream):
                dispatch(group, x, ids, tokens_per_rank=3)
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            pass
        print("LAST", groups[0].last_error())
    """)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    last = [line for line in run.stdout.splitlines() if line.startswith("LAST")]
    assert last, run.stdout + run.stderr
    assert all(word in last[0] for word in ("dispatch", "round 1", "rank 0", "rank 1", "rows", "1 s")), last


def test_windows_keep_their_counts_over_a_checkpoint() -> None:
    w, t, h, k, e = 2, 4, 64, 2, 4
    with ranks_of(w, MoEEpCommParams(e, k, t, h), **ON) as ranks:
        data = inputs(w, t, h, k, e, 3)
        for _ in range(2):
            outs = ranks.each(lambda rank, g: echo(g, *data[rank]))
            ranks.join()
            for rank in range(w):
                check_echo(outs[rank], *data[rank], e, w)
            if ranks.groups[0].describe()["memory"] == "cuda_ipc":  # type: ignore[attr-defined]
                pytest.skip("cudaIpc windows cannot keep their addresses")
            run_local_group(w, lambda rank: ranks.groups[rank].checkpoint_prepare())  # type: ignore[attr-defined]
            run_local_group(w, lambda rank: ranks.groups[rank].checkpoint_restore())  # type: ignore[attr-defined]


def test_without_the_switch_the_machine_decides() -> None:
    config = NVLinkOneSidedConfig(lamport=False, cft=True)
    groups = create_local_group(2, MoEEpCommParams(4, 2, 8, 64), config)
    reason = _C.counted_probe(torch.cuda.current_device())["reason"]
    assert all(g.cft_enabled == (not reason) for g in groups)  # type: ignore[attr-defined]
    assert not reason or groups[1].transport_refusals["cft"] == [f"rank {r}: {reason}" for r in range(2)]  # type: ignore[attr-defined]
    for group in groups:
        group.destroy()
