"""The Lamport transport on a GPU: equal bits, any payload, any order of rounds, graphs, masks, traps.

test_rows.py, test_protocol.py and the like run it too, in processes; here ranks are a local group (test_cuda.py).
"""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap

import pytest
import torch
from test_cuda import check_echo, inputs, ranks_of
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
    MoEEpCommParams,
    MoEEpCommunication,
    QuantFormat,
    combine,
    dispatch,
    run_local_group,
)

ON = {"lamport": None, "lamport_max_tokens": 2**20}


@pytest.mark.parametrize("hidden", [64, 1001, 7168])
@pytest.mark.parametrize("dispatch_format", FORMATS, ids=lambda f: f.name if f else "BF16")
@pytest.mark.parametrize("ep_size", [2, 3, 8])
def test_equals_the_fence_and_the_cpu_column(ep_size: int, dispatch_format: QuantFormat | None, hidden: int) -> None:
    e, k, c = 21, 5, 6
    params = MoEEpCommParams(e, k, c, hidden, dispatch_format=dispatch_format)
    lamport = {"lamport": None, "lamport_max_tokens": c}
    with ranks_of(ep_size, params, **lamport) as on, ranks_of(ep_size, params) as off:
        assert all(g.lamport_enabled for g in on.groups) and not any(g.lamport_enabled for g in off.groups)
        check_steps_of_every_size(params, [on, off], ep_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_combine_of_every_dtype_and_top_k(dtype: torch.dtype) -> None:
    check_combine(((2, 1, 2, 48), (4, 22, 30, 130), (8, 32, 40, 514)), dtype, ON)


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
    params = MoEEpCommParams(num_experts=16, top_k=4, max_tokens_per_rank=6, hidden_size=192)
    with ranks_of(8, params, **ON) as ranks:
        check_random_graphs(ranks, params, random.Random(5), graphs=24, rounds=100_000, eager=0.002,
                            points=("before_put", "before_flag", "after_flags"))


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
    check_masks(ON)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_and_go_on(what: str) -> None:
    check_disagreement(what, (4, 16), {"lamport": None, "lamport_max_tokens": 8})


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
