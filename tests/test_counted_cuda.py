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
from test_cuda import check_echo, check_echoes, echo, inputs, ranks_of
from transport_checks import (
    DISAGREEMENTS,
    FORMATS,
    check_combine,
    check_disagreement,
    check_masks,
    check_random_graphs,
    check_steps_of_every_size,
)

from torch_moe_ep import (
    _C,
    MoEEpCommParams,
    NVLinkOneSidedConfig,
    QuantFormat,
    combine,
    create_local_group,
    dispatch,
    run_local_group,
)

ON: dict[str, Any] = {"cft": True, "_emulate_cft": True}


@pytest.mark.parametrize("hidden", [64, 1024, 7168])
@pytest.mark.parametrize("dispatch_format", FORMATS, ids=lambda f: f.name if f else "BF16")
@pytest.mark.parametrize("ep_size", [2, 3, 8])
def test_equals_the_fence_and_the_cpu_column(ep_size: int, dispatch_format: QuantFormat | None, hidden: int) -> None:
    """Rows whose bytes are no multiple of 16 (here: scales of 2 and 56 bytes) take the fence."""
    e, k, c = 21, 5, 40
    params = MoEEpCommParams(e, k, c, hidden, dispatch_format=dispatch_format)
    with ranks_of(ep_size, params, **ON) as on, ranks_of(ep_size, params, cft=False) as off:
        assert all(g.cft_enabled for g in on.groups) and not any(g.cft_enabled for g in off.groups)  # type: ignore[attr-defined]
        check_steps_of_every_size(params, [on, off], ep_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_combine_of_every_dtype_and_top_k(dtype: torch.dtype) -> None:
    check_combine(((2, 1, 2, 48), (4, 22, 30, 136), (8, 32, 40, 2056)), dtype, ON)


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
    params = MoEEpCommParams(num_experts=16, top_k=4, max_tokens_per_rank=9, hidden_size=192)
    with ranks_of(4, params, **ON) as ranks:
        check_random_graphs(ranks, params, random.Random(6), graphs=16, rounds=10_000, eager=0.01,
                            points=("before_put", "before_flag", "before_rows", "after_flags"))


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
    check_masks(ON)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_and_go_on(what: str) -> None:
    """Totals and counters move alike in such a round: later rounds are right."""
    check_disagreement(what, (4, 8, 16), {"_emulate_cft": True, "cft_max_tokens_for_dispatch": 8})


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
        for stream in streams:  # what dispatch allocates there later must not wait for a kernel that waits
            with torch.cuda.stream(stream):
                torch.empty(1, device="cuda")
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
            check_echoes(ranks, data, e)
            if ranks.groups[0].describe()["memory"] == "cuda_ipc":  # type: ignore[attr-defined]
                pytest.skip("cudaIpc windows cannot keep their addresses")
            run_local_group(w, lambda rank: ranks.groups[rank].checkpoint_prepare())  # type: ignore[attr-defined]
            run_local_group(w, lambda rank: ranks.groups[rank].checkpoint_restore())  # type: ignore[attr-defined]


def test_without_the_switch_the_machine_decides() -> None:
    config = NVLinkOneSidedConfig(lamport=False, cft=True)
    groups = create_local_group(2, MoEEpCommParams(4, 2, 8, 64), config)
    reason = _C.counted_probe(torch.cuda.current_device())["reason"]
    refusals = groups[1].transport_refusals["cft"]  # type: ignore[attr-defined]
    assert all(g.cft_enabled == (not refusals) for g in groups)  # type: ignore[attr-defined]
    assert not reason or refusals == [f"rank {r}: {reason}" for r in range(2)]
    for group in groups:
        group.destroy()
