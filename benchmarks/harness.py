"""What every benchmark shares: rank processes, interleaved timing, JSON lines that name the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# What is loaded at first use may wait for the whole GPU, on which a rank may wait for this one. Read when CUDA starts.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torch_moe_ep

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def machine() -> dict[str, Any]:
    """Where a row was measured: CPU, cores, load, versions."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "torch_moe_ep": torch_moe_ep.__version__,
    }


class Results:
    """Prints one JSON line per row; writes them to a file too where one was named."""

    def __init__(self, benchmark: str, out: str | None) -> None:
        self.benchmark = benchmark
        self.file = open(out, "w") if out else None

    def emit(self, **row: Any) -> None:
        line = json.dumps({"benchmark": self.benchmark, **row, **machine()})
        print(line, flush=True)
        if self.file:
            print(line, file=self.file, flush=True)


def progress(text: str) -> None:
    """What is being measured or compiled now, beside the results."""
    print(text, file=sys.stderr, flush=True)


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the option that all benchmarks share."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", help="file for the JSON lines, beside stdout")
    return made


def summary(values: Sequence[float], name: str = "us") -> dict[str, float]:
    """Median, least and quartiles of repeats."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    named = {name: median, f"{name}_min": min(values), f"{name}_q1": q1, f"{name}_q3": q3}
    return {key: round(value, 2) for key, value in named.items()}


def time_interleaved(
    runs: dict[str, Callable[[], Any]], repeats: int, seconds_per_repeat: float, meet: Callable[[], Any]
) -> dict[str, list[float]]:
    """Microseconds of one call of each function, ``repeats`` times in turn, so that all meet the same disturbances.

    ``meet`` lines the ranks up before each repeat. The calls per repeat fill about ``seconds_per_repeat``, by the
    slowest rank's trial.
    """
    calls = {}
    for name, run in runs.items():
        run()
        meet()
        begin = time.perf_counter()
        run()
        slowest = torch.tensor([time.perf_counter() - begin])
        if dist.is_initialized():
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        calls[name] = max(1, int(seconds_per_repeat / slowest.item()))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            meet()
            begin = time.perf_counter()
            for _ in range(calls[name]):
                run()
            taken[name].append((time.perf_counter() - begin) / calls[name] * 1e6)
    return taken


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """``function(rank, *args)`` in ``world_size`` processes with a gloo group between them; results by rank."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch_moe_ep"])
    with tempfile.TemporaryDirectory(prefix="moe_ep_bench_") as folder:
        connections, processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(function, rank, world_size, folder, there, args), daemon=True)
            process.start()
            there.close()
            connections.append(here)
            processes.append(process)
        try:
            results = []
            for rank, connection in enumerate(connections):
                try:
                    results.append(connection.recv())
                except EOFError:
                    raise SystemExit(f"rank {rank} ended with an error, shown above") from None
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
    return results


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, folder: str, result: Connection, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)  # ranks may outnumber cores
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result.send(function(rank, *args))
    dist.barrier()
    dist.destroy_process_group()
