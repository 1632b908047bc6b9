"""The Lamport transport on a GPU: equal bits, any payload, any order of rounds, graphs, masks, traps.

test_rows.py, test_protocol.py and the like run it too, in processes; here ranks are a local group (test_cuda.py).
"""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from test_cuda import check_echo, echo, inputs, ranks_of

from torch_moe_ep import (
    MoEEpCommParams,
    MoEEpCommunication,
    QuantFormat,
    combine,
    create_local_group,
    dispatch,
    quantize,
    run_local_group,
)

ON = {"lamport": None, "lamport_max_tokens": 2**20}


def run_step(group: MoEEpCommunication, args: tuple[Any, ...], r: int) -> tuple[torch.Tensor, ...]:
    """Everything that is specified of a dispatch and its combine, as bytes on the CPU."""
    x, ids, weights, scale, rows = args
    got = dispatch(group, x, ids, weights, hidden_states_scale=scale, tokens_per_rank=r)
    out = combine(group, rows, got.routing, num_tokens=len(x))
    if x.is_cuda:
        torch.cuda.current_stream().synchronize()
    held = (got.topk_ids >= 0).any(1)
    tensors = [got.hidden_states[held], got.topk_ids, got.topk_weights, got.routing[1:], out]
    if scale is not None:
        assert got.hidden_states_scale is not None
        tensors.append(got.hidden_states_scale[held])
    return tuple(
        torch.empty(0) if t is None or not t.numel() else t.cpu().contiguous().view(torch.uint8) for t in tensors
    )


FORMATS = [None, QuantFormat.MXFP8, QuantFormat.DeepSeekFp8, QuantFormat.NVFP4]


@pytest.mark.parametrize("hidden", [64, 1001, 7168])
@pytest.mark.parametrize("dispatch_format", FORMATS, ids=lambda f: f.name if f else "BF16")
@pytest.mark.parametrize("ep_size", [2, 3, 8])
def test_equals_the_fence_and_the_cpu_column(ep_size: int, dispatch_format: QuantFormat | None, hidden: int) -> None:
    e, k, c = 21, 5, 6
    params = MoEEpCommParams(e, k, c, hidden, dispatch_format=dispatch_format)
    lamport = {"lamport": None, "lamport_max_tokens": c}
    with ranks_of(ep_size, params, **lamport) as on, ranks_of(ep_size, params) as off:
        assert all(g.lamport_enabled for g in on.groups) and not any(g.lamport_enabled for g in off.groups)
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
    for ep_size, k, e, hidden in ((2, 1, 2, 48), (4, 22, 30, 130), (8, 32, 40, 514)):
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


def test_any_payload_arrives_as_it_is() -> None:
    """Words that look like tags of this round or another, NaN of every pattern, all ones, zeros."""
    w, t, h, k, e = 2, 4, 512, 2, 4
    ids = torch.tensor([[0, 2]] * t, device="cuda")  # to both ranks
    with ranks_of(w, MoEEpCommParams(e, k, t, h, dtype=torch.float32), **ON) as ranks:
        for words in ([0], [2**32 - 1], [0x7FC00001, 0xFFFFFFFF, 0x7F800001], list(range(12)), [0x80000000]):
            pattern = torch.tensor(words, dtype=torch.int64).repeat(t * h)[: t * h].view(t, h)
            x = pattern.to(torch.uint32).view(torch.float32).cuda()
            got = ranks.each(lambda rank, g: dispatch(g, x, ids).hidden_states)  # noqa: B023
            ranks.join()
            for rows in got:
                for source in range(w):
                    here = rows[source * t : (source + 1) * t]
                    assert torch.equal(here.view(torch.int32), x.view(torch.int32)), words


def test_100_000_rounds_of_random_sizes_with_a_rank_held_up() -> None:
    """Graphs of random sizes, each with dispatches and combines in any order, replayed at random; results are compared
    inside the graphs. Ranks are held up at random between and within rounds."""
    w, h, k, e, c = 8, 192, 4, 16, 6
    rng = random.Random(5)
    with ranks_of(w, MoEEpCommParams(e, k, c, h), **ON) as ranks:
        from torch_moe_ep import _C

        wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(w)]
        graphs, rounds_of = [], []
        for n in range(24):
            for g in ranks.groups:
                for point in ("before_put", "before_flag", "after_flags"):
                    _C.set_delay(g.comm, point, rng.choice([0, 0, 0, 3, 20]) if n % 2 else 0)
            t = rng.randint(1, c)
            data = inputs(w, t, h, k, e, n)
            expected = [(x.float() * _copies(ids, e, w)).to(x.dtype) for x, ids in data]
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
            graphs.append((graph, data, expected))  # a graph reads both at every replay
            rounds_of.append(len(pattern))
        for g in ranks.groups:
            for point in ("before_put", "before_flag", "after_flags"):
                _C.set_delay(g.comm, point, 0)
        done = 0
        while done < 100_000:
            n = rng.randrange(len(graphs))
            graphs[n][0].replay()
            done += rounds_of[n]
            if rng.random() < 0.002:  # an eager step
                data = inputs(w, c, h, k, e, done)
                torch.cuda.synchronize()
                outs = ranks.each(lambda rank, g: echo(g, *data[rank]))  # noqa: B023
                torch.cuda.synchronize()
                for rank in range(w):
                    check_echo(outs[rank], *data[rank], e, w)
                done += 2
        torch.cuda.synchronize()
        assert [int(count) for count in wrong] == [0] * w
        assert ranks.groups[0].describe()["rounds"] >= 100_000  # type: ignore[attr-defined]


def _copies(ids: torch.Tensor, e: int, w: int) -> torch.Tensor:
    from test_cuda import copies

    return copies(ids, e, w)


def test_steps_of_both_transports_in_any_order() -> None:
    w, h, k, e, c = 4, 256, 3, 8, 40
    rng = random.Random(1)
    with ranks_of(w, MoEEpCommParams(e, k, c, h), lamport=None, lamport_max_tokens=7) as ranks:
        assert ranks.groups[0].lamport_max_tokens == 7  # type: ignore[attr-defined]
        for seed in range(300):
            r = rng.choice([1, 3, 7, 8, 40])
            data = inputs(w, rng.randint(0, r), h, k, e, seed)
            kept = ranks.each(lambda rank, g: dispatch(g, *data[rank], tokens_per_rank=r))  # noqa: B023
            if rng.random() < 0.3:  # another dispatch in between
                ranks.each(lambda rank, g: dispatch(g, *data[rank], tokens_per_rank=rng.choice([40])))  # noqa: B023
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
    w, h, k, e, c = 2, 64, 2, 4, 16
    with ranks_of(w, MoEEpCommParams(e, k, c, h), lamport=None, lamport_max_tokens=8) as ranks:
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
        for r in (4, 16):
            outs = ranks.each(lambda rank, g: echo(g, x, ids, r))  # noqa: B023
            ranks.join()
            for out in outs:
                check_echo(out, x, ids, e, w)


def test_a_rank_that_does_not_come_ends_in_a_sentence() -> None:
    program = textwrap.dedent("""
        import torch
        from torch_moe_ep import MoEEpCommParams, NVLinkOneSidedConfig, create_local_group, dispatch
        groups = create_local_group(2, MoEEpCommParams(4, 2, 8, 64), NVLinkOneSidedConfig(timeout_sec=1))
        assert groups[0].lamport_enabled
        x = torch.zeros(3, 64, device="cuda").bfloat16()
        ids = torch.zeros(3, 2, device="cuda", dtype=torch.int32)
        dispatch(groups[0], x, ids, tokens_per_rank=3)
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            pass
        print("LAST", groups[0].last_error())
        try:
            dispatch(groups[0], x, ids)
        except RuntimeError as error:
            print("NEXT", error)
    """)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    last = [line for line in run.stdout.splitlines() if line.startswith("LAST")]
    assert last, run.stdout + run.stderr
    assert all(word in last[0] for word in ("dispatch", "round 1", "rank 0", "rank 1", "1 s")), last
    assert "NEXT" in run.stdout


def test_off_on_one_rank_is_off_on_all() -> None:
    from torch_moe_ep import BootstrapConfig, NVLinkOneSidedConfig, create_communication
    from torch_moe_ep.local_group import _LocalCommBackend, _Rendezvous

    rendezvous = _Rendezvous(2)

    def make(rank: int) -> MoEEpCommunication:
        config = NVLinkOneSidedConfig(comm_backend=_LocalCommBackend(rendezvous, rank), lamport=False if rank else None)
        return create_communication(
            BootstrapConfig(2, rank), MoEEpCommParams(4, 2, 8, 64), config, _name_suffix=f".off.{rank}"
        )

    groups = run_local_group(2, make)
    for group in groups:
        assert not group.lamport_enabled and group.transport_refusals["lamport"] == ["rank 1: lamport=False"]
        group.destroy()
