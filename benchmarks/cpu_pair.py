"""Time of a dispatch+combine pair between processes of one host, against all_to_all_single on gloo in the same run.

Three users of gloo: the baseline, written for speed alone, and the backend torch_distributed with and without its
check of every step.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import torch_moe_ep
from benchmarks.c10d_baseline import C10dAlltoAll
from benchmarks.harness import DTYPES, Results, parser, run_ranks, summary, time_interleaved
from torch_moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    TorchDistributedConfig,
    create_communication,
)

COLLECTIVES = {"torch_distributed": True, "torch_distributed_unchecked": False}  # name: check_steps


def routing(rank: int, tokens: int, experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform top-k routing and its weights, a function of the rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, ids = scores.softmax(-1).topk(k)
    return ids.int(), weights


def assert_equal_bits(
    ours: torch_moe_ep.Dispatched, theirs: Any, out: torch.Tensor, their_out: torch.Tensor, num_experts: int
) -> None:
    """Ours and the baseline's rows, ids, weights and sums, bit for bit."""
    holds_token = ((ours.topk_ids >= 0) & (ours.topk_ids < num_experts)).any(1)
    assert ours.topk_weights is not None
    assert torch.equal(ours.topk_ids, theirs.topk_ids), "ids differ"
    for mine, other in ((ours.hidden_states, theirs.hidden_states), (ours.topk_weights, theirs.topk_weights)):
        assert torch.equal(
            mine[holds_token].contiguous().view(torch.uint8), other[holds_token].contiguous().view(torch.uint8)
        ), "rows differ"
    assert torch.equal(out.view(torch.uint8), their_out.contiguous().view(torch.uint8)), "sums differ"


def measure(
    rank: int, world_size: int, dtype: torch.dtype, hidden_size: int, k: int, experts: int, steps: list[int],
    repeats: int, seconds: float,
) -> list[dict[str, Any]]:
    params = MoEEpCommParams(experts, k, max(steps), hidden_size, dtype)
    comm = create_communication(BootstrapConfig(world_size, rank), params, "shm_one_sided")
    baseline = C10dAlltoAll(params, world_size)
    collectives = {
        name: create_communication(BootstrapConfig(world_size, rank), params, TorchDistributedConfig(check_steps=check))
        for name, check in COLLECTIVES.items()
    }
    measured = []
    for tokens in steps:
        ids, weights = routing(rank, tokens, experts, k)
        hidden = torch.randn(tokens, hidden_size, generator=torch.Generator().manual_seed(rank)).to(dtype)

        def pair(group: MoEEpCommunication) -> tuple[torch_moe_ep.Dispatched, torch.Tensor]:
            received = torch_moe_ep.dispatch(group, hidden, ids, weights, tokens_per_rank=tokens)  # noqa: B023
            return received, torch_moe_ep.combine(group, received.hidden_states, received.routing, num_tokens=tokens)  # noqa: B023

        # The experts are the identity. The rows of a record are not contiguous, and what all_to_all_single sends back
        # must be: experts would write their output there.
        expert_output = torch.zeros(world_size * tokens, hidden_size, dtype=dtype)

        def theirs() -> tuple[Any, torch.Tensor]:
            received = baseline.dispatch(hidden, ids, weights, tokens)  # noqa: B023
            return received, baseline.combine(expert_output, received)  # noqa: B023

        with torch.inference_mode():
            received, out = pair(comm)
            expected = baseline.dispatch(hidden, ids, weights, tokens)
            expert_output.copy_(expected.hidden_states)
            assert_equal_bits(received, expected, out, baseline.combine(expert_output, expected), experts)
            for group in collectives.values():
                rows, sums = pair(group)
                assert_equal_bits(rows, expected, sums, out, experts)
            runs = {"ours": partial(pair, comm), "gloo": theirs}
            runs |= {name: partial(pair, group) for name, group in collectives.items()}
            taken = time_interleaved(runs, repeats, seconds, dist.barrier)
        routed = sum(len(set((row // (experts // world_size)).tolist()) - {rank}) for row in ids)
        measured.append({"tokens": tokens, "taken": taken, "bytes": 2 * routed * hidden_size * dtype.itemsize})
        del received, out, expected
    window_bytes = comm.window_bytes
    dist.barrier()
    comm.destroy()
    return [{**row, "window_bytes": window_bytes} for row in measured]


def slowest(per_rank: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A collective has ended when its last rank has: by repeat, the slowest rank."""
    return [max(us) for us in zip(*(row["taken"][name] for row in per_rank), strict=True)]


def add_options(description: str | None) -> argparse.ArgumentParser:
    options = parser(description)
    options.add_argument("--hidden", type=int, default=4096)
    options.add_argument("--top-k", type=int, default=8)
    options.add_argument("--experts", type=int, default=64)
    options.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256, 2048])
    options.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--seconds", type=float, default=0.1, help="per repeat and side")
    return options


def report(benchmark: str, a: argparse.Namespace) -> None:
    """Measures every dtype, number of ranks and number of tokens asked for; one row each."""
    results = Results(benchmark, a.out)
    for dtype, world_size in itertools.product(a.dtypes, a.ranks):
        per_rank = run_ranks(
            measure, world_size, world_size, DTYPES[dtype], a.hidden, a.top_k, a.experts, a.tokens, a.repeats, a.seconds
        )
        for rows in zip(*per_rank, strict=True):
            us, gloo = slowest(rows, "ours"), slowest(rows, "gloo")
            results.emit(
                dtype=dtype, ranks=world_size, hidden_size=a.hidden, top_k=a.top_k, experts=a.experts,
                tokens=rows[0]["tokens"], repeats=a.repeats,
                **summary(us), **{f"gloo_{key}": value for key, value in summary(gloo).items()},
                **summary([g / o for g, o in zip(gloo, us, strict=True)], "ratio"),
                **{
                    f"{name}_{key}": value
                    for name in COLLECTIVES
                    for key, value in summary(slowest(rows, name)).items()
                },
                bytes_to_peers=max(row["bytes"] for row in rows), window_bytes=rows[0]["window_bytes"],
            )


def main() -> None:
    options = add_options(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[4])
    report("cpu_pair", options.parse_args())


if __name__ == "__main__":
    main()
