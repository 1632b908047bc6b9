"""How much of a peer's lateness a shared expert hides: layers of dispatch, experts and combine with one op or two each.

A step is a chain of layers. In each, a rank may come late to the dispatch (it sleeps before) and may be slow in its
experts (it sleeps there); the shared expert, a product of known length, runs after the combine ("none"), between start
and wait of the dispatch or of the combine, or (cuda) on a second stream beside one-phase ops. Patterns of lateness:

    quiet       nobody is late
    straggler   rank 1 comes late to every dispatch
    turns       rank 0 comes late to even layers, rank 1 to odd ones
    crossed     rank 1 comes late to every dispatch, rank 0 is as slow in its experts

On the CPU ranks are processes. With --device cuda they are a local group on one GPU, each a branch of one CUDA graph,
and sleep by spinning in a kernel of one thread.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import torch_moe_ep as ep
from benchmarks.harness import Results, parser, run_ranks, summary

WORLD_SIZE, TOKENS, HIDDEN, TOP_K, EXPERTS = 2, 32, 1024, 4, 8
PATTERNS = ("quiet", "straggler", "turns", "crossed")


def lateness(pattern: str, rank: int, layer: int) -> tuple[bool, bool]:
    """Whether a rank is late before the dispatch of a layer, and in its experts."""
    if pattern == "quiet":
        return False, False
    if pattern == "straggler":
        return rank == 1, False
    if pattern == "turns":
        return rank == layer % 2, False
    return rank == 1, rank == 0


def make_step(
    group: Any, rank: int, pattern: str, place: str, layers: int, sleep: Callable[[], None], shared: Callable[[], Any],
    device: torch.device,
) -> Callable[[], list[torch.Tensor]]:
    """The chain of layers of a rank; returns their outputs."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device, torch.bfloat16)
    weights, ids = (t.to(device) for t in torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K))

    def step() -> list[torch.Tensor]:
        outputs = []
        for layer in range(layers):
            late, slow = lateness(pattern, rank, layer)
            if late:
                sleep()
            if place == "dispatch":
                dispatching = ep.dispatch_start(group, x, ids, weights)
                shared()
                rows = ep.dispatch_wait(dispatching)
            else:
                if place == "stream":
                    side = torch.cuda.Stream()
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        shared()
                rows = ep.dispatch(group, x, ids, weights)
            if slow:
                sleep()
            if place == "combine":
                combining = ep.combine_start(group, rows.hidden_states, rows.routing, num_tokens=TOKENS)
                shared()
                out = ep.combine_wait(combining)
            else:
                out = ep.combine(group, rows.hidden_states, rows.routing, num_tokens=TOKENS)
            if place == "none":
                shared()
            if place == "stream":
                torch.cuda.current_stream().wait_stream(side)
            outputs.append(out)
        return outputs

    return step


def params() -> ep.MoEEpCommParams:
    return ep.MoEEpCommParams(EXPERTS, TOP_K, TOKENS, HIDDEN, torch.bfloat16)


def sleep_usec(usec: float) -> None:
    """Off the core for most of the time, then to the microsecond."""
    end = time.perf_counter() + usec / 1e6
    if usec > 300:
        time.sleep((usec - 200) / 1e6)
    while time.perf_counter() < end:
        pass


def measure_cpu(rank: int, args: Any) -> list[dict[str, Any]]:
    group = ep.create_communication(ep.BootstrapConfig(WORLD_SIZE, rank), params(), "shm_one_sided")
    left, right = torch.randn(args.shared_rows, HIDDEN), torch.randn(HIDDEN, HIDDEN)
    out = torch.empty(args.shared_rows, HIDDEN)

    def shared() -> None:
        torch.mm(left, right, out=out)

    rows = []
    for pattern in PATTERNS:
        for usec in [0] if pattern == "quiet" else args.late_us:
            steps = {
                place: make_step(group, rank, pattern, place, args.layers, lambda: sleep_usec(usec), shared,  # noqa: B023
                                 torch.device("cpu"))
                for place in ("none", "dispatch", "combine")
            }
            expected = steps["none"]()
            for step in steps.values():
                for mine, theirs in zip(step(), expected, strict=True):
                    assert torch.equal(mine, theirs)
            taken: dict[str, list[float]] = {place: [] for place in steps}
            alone = []
            for _ in range(args.repeats):
                begin = time.perf_counter()
                for _ in range(args.layers):
                    shared()
                alone.append((time.perf_counter() - begin) / args.layers * 1e6)
                for place, step in steps.items():
                    dist.barrier()
                    begin = time.perf_counter()
                    step()
                    taken[place].append((time.perf_counter() - begin) / args.layers * 1e6)
            rows.append({"pattern": pattern, "late_us": usec, "shared_us": statistics.median(alone), "taken": taken})
    group.destroy()
    return rows


def emit(results: Results, places: dict[str, list[float]], **row: Any) -> None:
    """A row per place; `hidden_us` is what a layer is shorter by than with one op each."""
    for place, values in places.items():
        gains = [one - two for one, two in zip(places["none"], values, strict=True)]
        ratios = [one / two for one, two in zip(places["none"], values, strict=True)]
        results.emit(
            **row, shared_at=place, **summary(values, "us_per_layer"), hidden_us=round(statistics.median(gains), 1),
            times_faster=round(statistics.median(ratios), 3),
        )


def run_cpu(args: Any, results: Results) -> None:
    by_rank = run_ranks(measure_cpu, WORLD_SIZE, args)
    for rows in zip(*by_rank, strict=True):
        # A repeat counts with its slowest rank.
        places = {
            place: [max(values) for values in zip(*(row["taken"][place] for row in rows), strict=True)]
            for place in rows[0]["taken"]
        }
        emit(results, places, device="cpu", ranks=WORLD_SIZE, layers=args.layers, pattern=rows[0]["pattern"],
             late_us=rows[0]["late_us"], shared_us=round(max(row["shared_us"] for row in rows), 1))


def run_cuda(args: Any, results: Results) -> None:
    device = torch.device("cuda")
    groups = ep.create_local_group(WORLD_SIZE, params(), "nvlink_one_sided")
    left = torch.randn(args.shared_rows, HIDDEN, device=device, dtype=torch.bfloat16)
    right = torch.randn(HIDDEN, HIDDEN, device=device, dtype=torch.bfloat16)
    outs = [torch.empty_like(left) for _ in groups]
    torch.mm(left, right)  # the workspace of cuBLAS

    def record(pattern: str, place: str, usec: float) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor], Any]:
        """A step of all ranks, its outputs, and what holds the tensors that a replay reads."""
        sleep = partial(torch.cuda._sleep, int(usec * cycles_per_us))
        steps = [
            make_step(group, rank, pattern, place, args.layers, sleep, partial(torch.mm, left, right, out=outs[rank]),
                      device)
            for rank, group in enumerate(groups)
        ]
        # No step runs before it is recorded: what cuBLAS allocates for a rank's stream would wait for the whole GPU, on
        # which this rank's peer waits for it.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            outputs: list[torch.Tensor] = []
            streams = [torch.cuda.Stream() for _ in groups]
            for stream in streams:
                stream.wait_stream(main)
            for step, stream in zip(steps, streams, strict=True):
                with torch.cuda.stream(stream):
                    outputs.extend(step())
            for stream in streams:
                main.wait_stream(stream)
        return graph, outputs, steps

    def elapsed_us(run: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    cycles = 10_000_000
    cycles_per_us = cycles / min(elapsed_us(lambda: torch.cuda._sleep(cycles)) for _ in range(5))
    alone = torch.cuda.CUDAGraph()
    with torch.cuda.graph(alone):
        for _ in range(args.layers):
            torch.mm(left, right, out=outs[0])
    shared_us = statistics.median(elapsed_us(alone.replay) for _ in range(args.repeats)) / args.layers
    for pattern, late in itertools.product(PATTERNS, args.late_us):
        usec = 0 if pattern == "quiet" else late
        if pattern == "quiet" and late != args.late_us[0]:
            continue
        recorded = {place: record(pattern, place, usec) for place in ("none", "dispatch", "combine", "stream")}
        expected = recorded["none"][1]
        for graph, outputs, _ in recorded.values():
            graph.replay()
            for mine, theirs in zip(outputs, expected, strict=True):
                assert torch.equal(mine, theirs)
        taken: dict[str, list[float]] = {place: [] for place in recorded}
        for _ in range(args.repeats):
            for place, (graph, *_) in recorded.items():
                taken[place].append(elapsed_us(graph.replay) / args.layers)
        emit(results, taken, device=torch.cuda.get_device_name(), ranks=WORLD_SIZE, layers=args.layers,
             pattern=pattern, late_us=usec, shared_us=round(shared_us, 1))
    for group in groups:
        group.destroy()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--repeats", type=int, default=31)
    options.add_argument("--late-us", type=float, nargs="+", default=None, help="lateness; default by device")
    options.add_argument("--shared-rows", type=int, default=None, help="rows of the shared expert's product")
    args = options.parse_args()
    cuda = args.device == "cuda"
    args.late_us = args.late_us or ([5, 20, 50] if cuda else [500, 1000, 3000])
    args.shared_rows = args.shared_rows or (1024 if cuda else 64)
    results = Results("overlap", args.out)
    (run_cuda if cuda else run_cpu)(args, results)


if __name__ == "__main__":
    main()
