"""What every transport of a GPU has to stand: test_lamport_cuda.py and test_counted_cuda.py run it on theirs.

``options`` are those of ``ranks_of`` in test_cuda.py, which turn the transport on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_cuda import Ranks, check_echo, check_echoes, copies, echo, inputs, ranks_of

from torch_moe_ep import (
    _C,
    MoEEpCommParams,
    MoEEpCommunication,
    QuantFormat,
    combine,
    create_local_group,
    dispatch,
    quantize,
    run_local_group,
)

FORMATS = [None, QuantFormat.MXFP8, QuantFormat.DeepSeekFp8, QuantFormat.NVFP4]


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


def check_against_cpu(
    cpu: list[MoEEpCommunication], groups: Sequence[Ranks], args: list[tuple[Any, ...]], r: int
) -> None:
    """A step with these arguments by rank gives the bits of the CPU column on all ``groups``."""
    w = len(cpu)
    moved = [tuple(a if a is None else a.cuda() for a in of_rank) for of_rank in args]
    expected = run_local_group(w, lambda rank: run_step(cpu[rank], args[rank], r))
    for ranks in groups:
        got = run_local_group(w, lambda rank: run_step(ranks.groups[rank], moved[rank], r))  # noqa: B023
        for mine, theirs in zip(got, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def check_steps_of_every_size(params: MoEEpCommParams, groups: Sequence[Ranks], ep_size: int) -> None:
    """R of 1, 4 and the capacity; T from 0 to R; ids that select nothing among the others."""
    cpu = create_local_group(ep_size, params)
    c, k, e, hidden = params.max_tokens_per_rank, params.top_k, params.num_experts, params.hidden_size
    for seed, r in enumerate((c, 1, 4, c)):
        g = torch.Generator().manual_seed(seed)
        args = []
        for rank in range(ep_size):
            t = [r, 0, r - 1][rank % 3]
            x, scale = torch.randn(t, hidden, generator=g).bfloat16(), None
            if params.dispatch_format:
                x, scale = quantize(x, params.dispatch_format)
                x = x.view(torch.uint8)
                if scale is not None:  # a lone column may have any stride, which a view of bytes refuses
                    scale = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            ids = torch.randint(-1, e + 2, (t, k), generator=g)
            rows = torch.randn(ep_size * r, hidden, generator=g).bfloat16()
            args.append((x, ids, torch.rand(t, k, generator=g), scale, rows))
        check_against_cpu(cpu, groups, args, r)
    for group in cpu:
        group.destroy()


def check_combine(shapes: Sequence[tuple[int, int, int, int]], dtype: torch.dtype, options: dict[str, Any]) -> None:
    """``shapes``: (W, K, E, H)."""
    for ep_size, k, e, hidden in shapes:
        params = MoEEpCommParams(e, k, 5, hidden, dtype=dtype)
        cpu = create_local_group(ep_size, params)
        with ranks_of(ep_size, params, **options) as ranks:
            g = torch.Generator().manual_seed(k)
            args = [
                (torch.randn(5, hidden, generator=g).to(dtype), torch.randint(-1, e + 1, (5, k), generator=g),
                 torch.rand(5, k, generator=g).to(dtype), None, torch.randn(ep_size * 5, hidden, generator=g).to(dtype))
                for _ in range(ep_size)
            ]
            check_against_cpu(cpu, [ranks], args, 5)
        for group in cpu:
            group.destroy()


def check_random_graphs(
    ranks: Ranks, params: MoEEpCommParams, rng: random.Random, *, graphs: int, rounds: int, eager: float,
    points: Sequence[str],
) -> None:
    """Graphs of random sizes, each with dispatches and combines in any order, replayed at random for ``rounds`` rounds,
    an eager step after each with the probability ``eager``. Ranks are held up at random at ``points``; results are
    compared inside the graphs."""
    w, c, h, k, e = (
        len(ranks.groups), params.max_tokens_per_rank, params.hidden_size, params.top_k, params.num_experts
    )
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(w)]
    captured = []
    for n in range(graphs):
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
        captured.append((graph, len(pattern), data, expected))  # a graph reads both at every replay
    for g in ranks.groups:
        for point in points:
            _C.set_delay(g.comm, point, 0)
    done = 0
    while done < rounds:
        graph, length, *_ = captured[rng.randrange(len(captured))]
        graph.replay()
        done += length
        if rng.random() < eager:
            check_echoes(ranks, inputs(w, c, h, k, e, done), e)
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0] * w
    assert ranks.groups[0].describe()["rounds"] >= rounds  # type: ignore[attr-defined]


def check_masks(options: dict[str, Any]) -> None:
    w, h, k, e, c = 3, 64, 3, 6, 5
    with ranks_of(w, MoEEpCommParams(e, k, c, h), enable_rank_mask=True, **options) as ranks:
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


DISAGREEMENTS = ["tokens_per_rank", "another transport", "another op"]


def check_disagreement(what: str, later: Sequence[int], options: dict[str, Any]) -> None:
    """The transport takes steps of up to 8 tokens; steps of ``later`` tokens follow."""
    w, h, k, e, c = 2, 64, 2, 4, 16
    with ranks_of(w, MoEEpCommParams(e, k, c, h), **options) as ranks:
        x, ids = inputs(1, 4, h, k, e, 1)[0]
        # Made before any op waits: what torch loads to make them may wait for the op.
        rows = torch.zeros(w * 4, h, device="cuda").bfloat16()
        routing = torch.full((1 + w + 2, 4), -1, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        other = {"tokens_per_rank": 6, "another transport": 12, "another op": 4}[what]

        def odd(rank: int, g: MoEEpCommunication) -> None:
            if rank == 1 and what == "another op":
                combine(g, rows, routing, num_tokens=4)
            else:
                dispatch(g, x, ids, tokens_per_rank=4 if rank == 0 else other)

        for before in (None, None, c):  # one such round after another, and after a dispatch over the fence
            if before is not None:
                ranks.each(lambda _, g: dispatch(g, x, ids, tokens_per_rank=before))  # noqa: B023
            ranks.each(odd)
            ranks.join()
            for rank, g in enumerate(ranks.groups):
                named = "the op" if what == "another op" else "tokens_per_rank"
                with pytest.raises(RuntimeError, match=named) as caught:
                    dispatch(g, x, ids)
                assert f"rank {rank} has" in str(caught.value) and f"rank {1 - rank} has" in str(caught.value)
        for r in later:
            outs = ranks.each(lambda rank, g: echo(g, x, ids, r))  # noqa: B023
            ranks.join()
            for out in outs:
                check_echo(out, x, ids, e, w)
