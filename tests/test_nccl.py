"""The backend over collectives on NCCL: one process per GPU, at most four. Collected only where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from cases import CASES, Step
from ranks import Rank, RankPool
from tiny_model import PATIENCE

import torch_moe_ep
from torch_moe_ep import BootstrapConfig, MoEEpCommParams, create_communication


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(min(torch.cuda.device_count(), 4), "cuda") as pool:
        yield pool


def run_cases(rank: Rank) -> None:
    """Of every case that masks no rank, the bits of the reference."""
    nccl, w = dist.new_group(backend="nccl"), rank.world_size
    for seed, case in enumerate(case for case in CASES if not case.masked):
        group = create_communication(
            BootstrapConfig(w, rank.rank, process_group=nccl), case.params(w), "torch_distributed"
        )
        assert group.order.device == rank.device and group.describe()["backend"] == "nccl"
        step = Step(case, w, rank.rank, seed, rank.device)
        step.dispatch(group)
        step.combine(group)
        group.destroy()
    dist.destroy_process_group(nccl)


def test_every_case(pool: RankPool) -> None:
    pool.run(run_cases, timeout=PATIENCE)


def run_in_graphs(rank: Rank) -> None:
    """Compiled by Inductor and captured by hand, output and gradients are those of eager code."""
    torch._dynamo.reset()
    nccl, w = dist.new_group(backend="nccl"), rank.world_size
    params = MoEEpCommParams(num_experts=6, top_k=2, max_tokens_per_rank=8, hidden_size=16, dtype=torch.float32)
    group = create_communication(BootstrapConfig(w, rank.rank, process_group=nccl), params, "torch_distributed")

    def step(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        got = torch_moe_ep.dispatch(group, x, ids)
        rows = torch.where((got.topk_ids >= 0).any(1, keepdim=True), got.hidden_states * 2, 0)
        return torch_moe_ep.combine(group, rows, got.routing, num_tokens=x.shape[0])

    x = torch.randn(7, 16, device=rank.device)
    ids = torch.randint(-1, 6, (7, 2), device=rank.device)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outs = [run(leaf, ids) for run, leaf in zip((step, torch.compile(step, fullgraph=True)), leaves, strict=True)]
    for out in outs:
        out.square().sum().backward()
    assert torch.equal(*outs) and torch.equal(leaves[0].grad, leaves[1].grad) and (outs[0] != 0).any()

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, ids)
    for scale in (1, -3):
        x.mul_(scale)
        graph.replay()
        assert torch.equal(captured, step(x, ids))
    group.destroy()
    dist.destroy_process_group(nccl)


def test_compiled_and_captured(pool: RankPool) -> None:
    pool.run(run_in_graphs, timeout=PATIENCE)
