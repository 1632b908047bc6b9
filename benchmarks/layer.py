"""Time of a step of MoEEpLayer, and the share of it that dispatch and combine take: eager, compiled, in a CUDA graph.

    python -m benchmarks.layer [--device cuda] [--ranks 1 2] [--tokens 16 256] [--out FILE]

A step is dispatch, SwiGLU experts and combine, without gradients; the communication alone is a dispatch and a combine
of the same tokens, run the same way. Ranks are processes: on CPU they share the cores; on CUDA each has a GPU, or they
share the GPUs that there are, for which CUDA's Multi-Process Service must run: without it they take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import torch_moe_ep
from benchmarks.harness import DTYPES, Results, parser, progress, run_ranks, summary, time_interleaved
from torch_moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpLayer,
    MoEEpTensors,
    MoEWeightPack,
    create_communication,
)

Run = Callable[[], Any]

WAYS = ("eager", "compiled", "captured", "compiled, captured")


@dataclass
class Sizes:
    hidden: int
    inner: int
    experts: int
    top_k: int
    dtype: torch.dtype

    def params(self, tokens: int) -> MoEEpCommParams:
        return MoEEpCommParams(self.experts, self.top_k, tokens, self.hidden, self.dtype)


def make_layer(group: MoEEpCommunication, sizes: Sizes) -> MoEEpLayer:
    local, device = group.num_local_experts, group.order.device
    w13 = torch.empty(local, 2 * sizes.inner, sizes.hidden, dtype=sizes.dtype, device=device)
    w2 = torch.empty(local, sizes.hidden, sizes.inner, dtype=sizes.dtype, device=device)
    torch.manual_seed(group.ep_rank)
    for weight in (w13, w2):
        weight.normal_(std=weight.shape[2] ** -0.5)
    return MoEEpLayer(weights=MoEWeightPack(w13, w2), group=group)


def make_tensors(group: MoEEpCommunication, sizes: Sizes, tokens: int) -> MoEEpTensors:
    """Uniform routing, a function of the rank."""
    generator, device = torch.Generator().manual_seed(1000 + group.ep_rank), group.order.device
    weights, ids = torch.rand(tokens, sizes.experts, generator=generator).softmax(-1).topk(sizes.top_k)
    x = torch.randn(tokens, sizes.hidden, generator=generator).to(device, sizes.dtype)
    return MoEEpTensors(x, ids.int().to(device), weights.to(device), runtime_max_tokens_per_rank=tokens)


def pair_of(group: MoEEpCommunication) -> Callable[[MoEEpTensors], torch.Tensor]:
    def pair(t: MoEEpTensors) -> torch.Tensor:
        got = torch_moe_ep.dispatch(
            group, t.hidden_states, t.topk_ids, t.topk_weights, tokens_per_rank=t.runtime_max_tokens_per_rank
        )
        return torch_moe_ep.combine(group, got.hidden_states, got.routing, num_tokens=t.hidden_states.shape[0])

    return pair


def captured(run: Run) -> Run:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def until_done(run: Run) -> Run:
    def and_wait() -> None:
        run()
        torch.cuda.synchronize()

    return and_wait


def measure(
    rank: int, world_size: int, device: str, sizes: Sizes, steps: list[int], ways: list[str], repeats: int,
    seconds: float,
) -> list[dict[str, list[float]]]:
    """One rank of several processes: by number of tokens, the microseconds of every run."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    group = create_communication(
        BootstrapConfig(world_size, rank), sizes.params(max(steps)),
        "nvlink_one_sided" if device == "cuda" else "shm_one_sided",
    )
    layer, pair = make_layer(group, sizes), pair_of(group)
    measured = []
    with torch.inference_mode():
        for tokens in steps:
            t = make_tensors(group, sizes, tokens)
            torch._dynamo.reset()
            expected, runs = layer(t), {}
            for way in ways:
                if rank == 0:
                    progress(f"{world_size} ranks, {tokens} tokens, {way}")
                for name, function in (("step", layer), ("pair", pair)):
                    if "compiled" in way:
                        function = torch.compile(function, fullgraph=True, dynamic=False)
                    run: Run = partial(function, t)
                    if name == "step":
                        torch.testing.assert_close(run(), expected, rtol=0.05, atol=0.05)
                    if "captured" in way:
                        run = captured(run)
                    runs[f"{way}/{name}"] = until_done(run) if device == "cuda" else run
            measured.append(time_interleaved(runs, repeats, seconds, dist.barrier))
    dist.barrier()
    group.destroy()
    return measured


def report(results: Results, a: argparse.Namespace, sizes: Sizes, world_size: int, ways: list[str]) -> None:
    per_rank = run_ranks(measure, world_size, world_size, a.device, sizes, a.tokens, ways, a.repeats, a.seconds)
    gpus = {"gpus": min(world_size, torch.cuda.device_count())} if a.device == "cuda" else {}
    for tokens, taken in zip(a.tokens, zip(*per_rank, strict=True), strict=True):
        for way in ways:
            # A collective has ended when its last rank has.
            step, pair = (
                [max(us) for us in zip(*(rank[f"{way}/{name}"] for rank in taken), strict=True)]
                for name in ("step", "pair")
            )
            timed = summary(step)
            results.emit(
                device=torch.cuda.get_device_name() if a.device == "cuda" else "cpu", way=way, dtype=a.dtype,
                ranks=world_size, **gpus, tokens=tokens, hidden_size=a.hidden, inner_size=a.inner, experts=a.experts,
                top_k=a.top_k, repeats=a.repeats, **timed,
                tokens_per_second=round(world_size * tokens / timed["us"] * 1e6, 1),
                **summary(pair, "communication_us"),
                communication_share=round(summary(pair)["us"] / timed["us"], 3),
            )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--ranks", type=int, nargs="+", help="default: 1 2 on CPU, 1 on CUDA")
    options.add_argument("--tokens", type=int, nargs="+", help="per rank; default: 16 256 on CPU, 1 to 4096 on CUDA")
    options.add_argument("--ways", nargs="+", choices=WAYS)
    options.add_argument("--dtype", choices=DTYPES, help="default: float32 on CPU, bfloat16 on CUDA")
    options.add_argument("--hidden", type=int, help="default: 512 on CPU, 2048 on CUDA")
    options.add_argument("--inner", type=int, help="default: 256 on CPU, 768 on CUDA")
    options.add_argument("--experts", type=int, help="default: 16 on CPU, 128 on CUDA")
    options.add_argument("--top-k", type=int, help="default: 4 on CPU, 8 on CUDA")
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--seconds", type=float, default=0.1, help="per repeat and run")
    a = options.parse_args()
    cuda = a.device == "cuda"
    defaults: dict[str, Any] = {
        "ranks": [1] if cuda else [1, 2],
        "tokens": [1, 16, 128, 1024, 4096] if cuda else [16, 256],
        "ways": WAYS if cuda else WAYS[:2],
        "dtype": "bfloat16" if cuda else "float32",
        "hidden": 2048 if cuda else 512, "inner": 768 if cuda else 256,
        "experts": 128 if cuda else 16, "top_k": 8 if cuda else 4,
    }
    for name, value in defaults.items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    if not cuda and any("captured" in way for way in a.ways):
        options.error("--ways with captured need --device cuda")
    results = Results("layer", a.out)
    sizes = Sizes(a.hidden, a.inner, a.experts, a.top_k, DTYPES[a.dtype])
    for world_size in a.ranks:
        report(results, a, sizes, world_size, a.ways)


if __name__ == "__main__":
    main()
