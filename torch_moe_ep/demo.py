"""A compiled decoder with Mixture-of-Experts layers on several processes: ``python -m torch_moe_ep.demo``.

Every process owns a block of the experts and has a batch of its own. The decoder's tokens reach their experts through
``torch_moe_ep.dispatch`` and come home through ``torch_moe_ep.combine``. Afterwards the starting process runs the same
weights over all batches without either, expert by expert, and compares.

Exit code: 0 when everything agrees, 1 on a mismatch, a graph break or the death of a rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import torch_moe_ep
from torch_moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    NVLinkOneSidedAlltoAll,
    NVLinkOneSidedConfig,
    ShmOneSidedConfig,
)
from torch_moe_ep.one_sided import OneSidedAlltoAll

DEADLINE_SEC = 600
"""Of the whole demo; a wait on a peer inside an op ends after half of it."""

LOGITS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1}
"""Largest difference allowed between logits, whose spread is about 1. The names are the dtypes that run."""
ROUTER_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""The same between probabilities of a router, see ReferenceMoELayer."""


@dataclass(frozen=True)
class Sizes:
    """Of the decoder and of the run."""

    ranks: int = 4
    layers: int = 4
    hidden: int = 256
    tokens: int = 64  # per rank and step, in two sequences
    steps: int = 20
    experts: int = 16
    top_k: int = 4
    expert_hidden: int = 256
    heads: int = 4
    vocab: int = 512


Weights = dict[str, torch.Tensor]


def make_weights(s: Sizes, dtype: torch.dtype) -> Weights:
    """All weights, of all experts; equal in every process that calls it."""
    generator = torch.Generator().manual_seed(20)

    def normal(*shape: int, fan_in: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * fan_in**-0.5).to(dtype)

    weights = {"embedding": normal(s.vocab, s.hidden, fan_in=1), "logits": normal(s.vocab, s.hidden, fan_in=s.hidden)}
    for i in range(s.layers):
        weights |= {
            f"{i}.qkv": normal(3 * s.hidden, s.hidden, fan_in=s.hidden),
            f"{i}.projection": normal(s.hidden, s.hidden, fan_in=s.hidden),
            f"{i}.router": normal(s.experts, s.hidden, fan_in=s.hidden).float(),
            f"{i}.gate": normal(s.experts, s.expert_hidden, s.hidden, fan_in=s.hidden),
            f"{i}.up": normal(s.experts, s.expert_hidden, s.hidden, fan_in=s.hidden),
            f"{i}.down": normal(s.experts, s.hidden, s.expert_hidden, fan_in=s.expert_hidden),
        }
    return weights


def make_batch(s: Sizes, rank: int, step: int) -> torch.Tensor:
    """Token ids of one rank's step: two sequences."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(s.vocab, (2, s.tokens // 2), generator=generator)


class Attention(nn.Module):
    def __init__(self, s: Sizes, weights: Weights, layer: int) -> None:
        super().__init__()
        self.heads = s.heads
        self.qkv = nn.Parameter(weights[f"{layer}.qkv"], requires_grad=False)
        self.projection = nn.Parameter(weights[f"{layer}.projection"], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [sequences, length, H]
        q, k, v = F.linear(x, self.qkv).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.projection)


def route(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """Probabilities of the experts, float32."""
    return F.linear(x.float(), router).softmax(-1)


class MoELayer(nn.Module):
    """The experts of this rank, and the way to those of the others.

    It holds what ``torch_moe_ep.dispatch`` and ``combine`` need of a communicator, so it passes itself to them. The
    order tensor is a buffer, not persistent: it belongs to the process and not to a checkpoint.
    """

    order: torch.Tensor
    local_experts: torch.Tensor

    def __init__(self, weights: Weights, layer: int, group: MoEEpCommunication) -> None:
        super().__init__()
        self.comm, self.ep_size, self.params, self.timeout_sec = (
            group.comm, group.ep_size, group.params, group.timeout_sec
        )
        self.register_buffer("order", group.order, persistent=False)
        mine = slice(group.local_experts.start, group.local_experts.stop)
        # A tensor and no number in the code: so the graph is the same on every rank, and compiled once for all.
        self.register_buffer("local_experts", torch.arange(mine.start, mine.stop))
        self.router = nn.Parameter(weights[f"{layer}.router"], requires_grad=False)
        # Side by side the local experts are one wide SwiGLU.
        self.gate = nn.Parameter(weights[f"{layer}.gate"][mine].flatten(0, 1), requires_grad=False)
        self.up = nn.Parameter(weights[f"{layer}.up"][mine].flatten(0, 1), requires_grad=False)
        down = weights[f"{layer}.down"][mine].transpose(0, 1).flatten(1)
        self.down = nn.Parameter(down.contiguous(), requires_grad=False)

    def experts(self, received: torch_moe_ep.Dispatched) -> torch.Tensor:
        """What the local experts make of the received rows, weighted and summed: [W*R, H]."""
        assert received.topk_weights is not None  # they were sent
        chosen = received.topk_ids[:, None, :] == self.local_experts[:, None]  # [W*R, local experts, K]
        weights = torch.where(chosen, received.topk_weights[:, None, :], 0).sum(-1)
        # The bytes of rows that hold no token are unspecified, and might be NaN.
        rows = torch.where(chosen.flatten(1).any(1, keepdim=True), received.hidden_states, 0)
        activations = F.silu(F.linear(rows, self.gate)) * F.linear(rows, self.up)
        activations = activations.unflatten(1, (len(self.local_experts), -1)) * weights[:, :, None]
        return F.linear(activations.flatten(1).to(rows.dtype), self.down)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [T, H] -> [T, H], [T, K]
        weights, ids = route(x, self.router).topk(self.params.top_k)
        received = torch_moe_ep.dispatch(self, x, ids, weights)
        return torch_moe_ep.combine(self, self.experts(received), received.routing, num_tokens=x.shape[0]), ids


class ReferenceMoELayer(nn.Module):
    """All experts in one process, one after the other, without dispatch and combine.

    Rounding differs from the distributed run, so where two experts' probabilities are nearly equal the choice may
    differ too, and from there on everything. It therefore takes the ids that the run chose, and notes in ``gap`` how
    much less probable than its own choice they were: that must be rounding as well.
    """

    def __init__(self, weights: Weights, layer: int) -> None:
        super().__init__()
        self.router, self.gate, self.up, self.down = (
            weights[f"{layer}.{name}"] for name in ("router", "gate", "up", "down")
        )
        self.ids = torch.empty(0)
        self.gap = 0.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = route(x, self.router)
        own = probabilities.topk(self.ids.shape[1]).values
        chosen = probabilities.gather(1, self.ids)
        self.gap = max(self.gap, (own - chosen.sort(dim=1, descending=True).values).max().item())
        total = torch.zeros(x.shape)
        for expert in range(len(self.gate)):
            weight = torch.where(self.ids == expert, chosen, 0).sum(1, keepdim=True)
            activations = F.silu(F.linear(x, self.gate[expert])) * F.linear(x, self.up[expert])
            total += F.linear((activations * weight).to(x.dtype), self.down[expert]).float()
        return total.to(x.dtype), self.ids


class Decoder(nn.Module):
    """Embedding, layers of attention and experts with residuals, logits."""

    def __init__(self, s: Sizes, weights: Weights, make_moe: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Parameter(weights["embedding"], requires_grad=False)
        self.logits = nn.Parameter(weights["logits"], requires_grad=False)
        self.attention = nn.ModuleList(Attention(s, weights, i) for i in range(s.layers))
        self.moe = nn.ModuleList(make_moe(i) for i in range(s.layers))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[T, vocab]`` of ``[sequences, length]`` token ids, and the expert ids ``[layers, T, K]`` chosen."""
        x = F.embedding(tokens, self.embedding)
        chosen = []
        for attention, moe in zip(self.attention, self.moe, strict=True):
            x = x + attention(F.rms_norm(x, x.shape[-1:]))
            y, ids = moe(F.rms_norm(x, x.shape[-1:]).flatten(0, 1))
            x = x + y.unflatten(0, x.shape[:2])
            chosen.append(ids)
        return F.linear(F.rms_norm(x, x.shape[-1:]), self.logits).flatten(0, 1), torch.stack(chosen)


def make_group(s: Sizes, rank: int, dtype: torch.dtype, device: torch.device) -> OneSidedAlltoAll:
    params = MoEEpCommParams(s.experts, s.top_k, s.tokens, s.hidden, dtype)
    backend = NVLinkOneSidedConfig if device.type == "cuda" else ShmOneSidedConfig
    config = backend(timeout_sec=DEADLINE_SEC // 2)
    group = torch_moe_ep.create_communication(BootstrapConfig(s.ranks, rank, device=device.index), params, config)
    assert isinstance(group, OneSidedAlltoAll)
    return group


def time_ops(s: Sizes, group: MoEEpCommunication, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Median microseconds of one dispatch and of one combine, by themselves."""
    generator = torch.Generator().manual_seed(group.ep_rank)
    x = torch.randn(s.tokens, s.hidden, generator=generator).to(device, dtype)
    weights, ids = torch.rand(s.tokens, s.experts, generator=generator).to(device).topk(s.top_k)
    taken: tuple[list[float], list[float]] = ([], [])

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() * 1e6

    for _ in range(100):
        begin = now()
        received = torch_moe_ep.dispatch(group, x, ids, weights)
        middle = now()
        torch_moe_ep.combine(group, received.hidden_states, received.routing, num_tokens=s.tokens)
        taken[0].append(middle - begin)
        taken[1].append(now() - middle)
    return statistics.median(taken[0]), statistics.median(taken[1])


def sent_bytes(s: Sizes, group: MoEEpCommunication, ids: torch.Tensor, itemsize: int) -> int:
    """What one step makes this rank send: rows to peers and their partials back, and every peer's ids and weights."""
    owner = torch.empty(s.experts, dtype=torch.int64)
    for rank in range(s.ranks):
        owner[list(group.params.local_experts(rank, s.ranks))] = rank
    targets = F.one_hot(owner[ids], s.ranks).amax(-2)  # [layers, T, W]
    rows = int(targets.sum() - targets[..., group.ep_rank].sum())
    return rows * s.hidden * itemsize * 2 + s.layers * s.tokens * s.top_k * 8 * (s.ranks - 1)


def run_rank(rank: int, s: Sizes, device_type: str, folder: str, reports: Connection) -> None:
    """One process of the group; reports (what, value)."""
    try:
        threads = max(1, len(os.sched_getaffinity(0)) // s.ranks)
        torch.set_num_threads(threads)
        inductor_config.compile_threads = threads
        device = torch.device(device_type)
        if device_type == "cuda":
            device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", s.ranks), rank=rank, world_size=s.ranks)
        for name in LOGITS_TOLERANCE:
            reports.send(("progress", f"{name}: compiling the decoder"))
            reports.send((name, run_decoder(s, rank, name, device, folder)))
        reports.send(("done", None))
        dist.destroy_process_group()
    except BaseException:
        reports.send(("failed", traceback.format_exc()))
        sys.exit(1)


def run_decoder(s: Sizes, rank: int, name: str, device: torch.device, folder: str) -> dict[str, Any]:
    """Compiles and runs the decoder in one dtype. Leaves what the first step gave in ``folder``."""
    dtype = getattr(torch, name)
    torch._dynamo.reset()
    counters.clear()
    group = make_group(s, rank, dtype, device)
    weights = make_weights(s, dtype)
    decoder = Decoder(s, weights, lambda layer: MoELayer(weights, layer, group)).to(device)
    compiled = torch.compile(decoder, fullgraph=True, dynamic=False)
    batches = [make_batch(s, rank, step).to(device) for step in range(1 + s.steps)]
    begin = time.perf_counter()
    logits, ids = compiled(batches[0])
    torch.save((logits.float().cpu(), ids.cpu()), f"{folder}/{name}.{rank}.pt")
    compile_sec = time.perf_counter() - begin
    dist.barrier()
    begin = time.perf_counter()
    for batch in batches[1:]:
        logits, _ = compiled(batch)
    logits.cpu()  # waits for the device
    step_sec = (time.perf_counter() - begin) / s.steps
    dist.barrier()
    us = time_ops(s, group, dtype, device)
    report = {
        "backend": group.backend_name,
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "compile s": compile_sec,
        "step_sec": step_sec,
        "us per dispatch": us[0],
        "us per combine": us[1],
        "KiB sent per step and rank": sent_bytes(s, group, ids.cpu(), dtype.itemsize) / 1024,
        "KiB of window per rank": group.window_bytes / 1024,
        "graphs": counters["stats"]["unique_graphs"],
        "graph breaks": sum(counters["graph_break"].values()),
    }
    dist.barrier()
    group.destroy()
    return report


def compare(s: Sizes, name: str, folder: str) -> tuple[float, float]:
    """Largest error of the logits of any rank, and largest gap of the routers (see ReferenceMoELayer)."""
    weights = make_weights(s, getattr(torch, name))
    layers = [ReferenceMoELayer(weights, layer) for layer in range(s.layers)]
    reference = Decoder(s, weights, layers.__getitem__)
    errors = []
    for rank in range(s.ranks):
        logits, ids = torch.load(f"{folder}/{name}.{rank}.pt")
        for layer, chosen in zip(layers, ids, strict=True):
            layer.ids = chosen
        expected, _ = reference(make_batch(s, rank, 0))
        errors.append((logits - expected.float()).abs().max())
    return torch.stack(errors).max().item(), max(layer.gap for layer in layers)


class Ranks:
    """The processes. Whatever happens, none outlives :meth:`close`."""

    def __init__(self, s: Sizes, device_type: str, folder: str) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch_moe_ep"])
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(s.ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=run_rank, args=(rank, s, device_type, folder, there), daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def collect(self) -> dict[str, list[dict[str, Any]]]:
        """Reports by dtype and rank. Prints progress; SystemExit when a rank died or time ran out."""
        collected: dict[str, dict[int, dict[str, Any]]] = {}
        begin = said = time.monotonic()
        pending = list(self.connections)
        while pending:
            for connection in wait(pending, timeout=1):
                assert isinstance(connection, Connection)
                rank = self.connections.index(connection)
                try:
                    what, value = connection.recv()
                except EOFError:
                    self.processes[rank].join(timeout=5)
                    self.fail(f"rank {rank} died with exit code {self.processes[rank].exitcode}")
                if what == "failed":
                    self.fail(f"rank {rank} failed:\n{value}")
                elif what == "done":
                    pending.remove(connection)
                elif what != "progress":
                    collected.setdefault(what, {})[rank] = value
                elif rank == 0:
                    said = time.monotonic()
                    print(f"{value}  [{said - begin:.0f} s]", flush=True)
            if time.monotonic() - begin > DEADLINE_SEC:
                self.fail(f"not finished after {DEADLINE_SEC} s")
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"  ... {said - begin:.0f} s", flush=True)
        return {name: [by_rank[rank] for rank in sorted(by_rank)] for name, by_rank in collected.items()}

    def fail(self, text: str) -> NoReturn:
        print(f"FAIL: {text}", flush=True)
        raise SystemExit(1)

    def close(self, patience_sec: float = 0) -> None:
        """Ends the processes; those that are about to end by themselves get the time to."""
        for process in self.processes:
            process.join(timeout=patience_sec)
            process.kill()
            process.join()


def choose_device(asked: str) -> str:
    reason = NVLinkOneSidedAlltoAll.unsupported_reason()
    if asked == "cuda" and reason:
        raise SystemExit(f"--device cuda: {reason}")
    return ("cpu" if reason else "cuda") if asked == "auto" else asked


def main() -> int:
    defaults = Sizes()
    options = argparse.ArgumentParser(prog="python -m torch_moe_ep.demo", description=(__doc__ or "").split("\n")[0])
    for name, text in (
        ("ranks", "processes, each with its block of the experts"),
        ("layers", "decoder layers"),
        ("hidden", "size of a token's row"),
        ("tokens", "tokens per rank and step"),
        ("steps", "timed steps"),
    ):
        options.add_argument(f"--{name}", type=int, default=getattr(defaults, name), help=f"{text} (%(default)s)")
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    a = options.parse_args()
    s = Sizes(a.ranks, a.layers, a.hidden, a.tokens, a.steps)
    if not 1 <= s.ranks <= s.experts:
        options.error(f"--ranks: expected 1..{s.experts}, got {s.ranks}")
    if s.hidden < 1 or s.hidden % (2 * s.heads) or s.tokens < 2 or s.tokens % 2 or min(s.layers, s.steps) < 1:
        options.error(
            f"expected --hidden a multiple of {2 * s.heads}, --tokens an even number, --layers and --steps 1 or more"
        )
    device = choose_device(a.device)
    print(
        f"torch_moe_ep {torch_moe_ep.__version__}, torch {torch.__version__}: {s.ranks} ranks on {device}, "
        f"a decoder of {s.layers} layers, hidden {s.hidden}, {s.experts} experts of which each token takes {s.top_k}, "
        f"{s.tokens} tokens per rank and step",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="moe_ep_demo_") as folder:
        ranks = Ranks(s, device, folder)
        try:
            reports = ranks.collect()
            ranks.close(patience_sec=10)
        finally:
            ranks.close()
        print("comparing with one process", flush=True)
        with torch.no_grad():
            errors = {name: compare(s, name, folder) for name in LOGITS_TOLERANCE}
    return print_report(s, reports, errors)


def print_report(s: Sizes, reports: dict[str, list[dict[str, Any]]], errors: dict[str, tuple[float, float]]) -> int:
    """The table; returns the exit code."""
    first = reports["float32"][0]
    weights = make_weights(s, torch.float32)
    total = sum(w.numel() for w in weights.values())
    print(f"\n{first['backend']}; {total / 1e6:.1f} M parameters, {first['parameters'] / 1e6:.1f} M on rank 0\n")
    print(f"{'':28}" + "".join(f"{name:>12}" for name in reports))

    def line(label: str, value: Callable[[str], str]) -> None:
        print(f"{label:28}" + "".join(f"{value(name):>12}" for name in reports))

    def worst(name: str, key: str) -> float:
        return max(report[key] for report in reports[name])

    line("tokens/s, all ranks", lambda name: f"{s.ranks * s.tokens / worst(name, 'step_sec'):.0f}")
    for key, digits in (
        ("us per dispatch", 0), ("us per combine", 0), ("KiB sent per step and rank", 0),
        ("KiB of window per rank", 0), ("compile s", 1), ("graphs", 0), ("graph breaks", 0),
    ):
        line(key, lambda name, key=key, digits=digits: f"{worst(name, key):.{digits}f}")  # type: ignore[misc]
    line("max error of logits", lambda name: f"{errors[name][0]:.1e}")
    line("  allowed", lambda name: f"{LOGITS_TOLERANCE[name]:.0e}")
    line("max gap of router", lambda name: f"{errors[name][1]:.1e}")
    line("  allowed", lambda name: f"{ROUTER_TOLERANCE[name]:.0e}")
    # Written so that NaN fails.
    passed = {
        name: errors[name][0] <= LOGITS_TOLERANCE[name]
        and errors[name][1] <= ROUTER_TOLERANCE[name]
        and worst(name, "graph breaks") == 0
        for name in reports
    }
    line("", lambda name: "PASS" if passed[name] else "FAIL")
    ok = passed.keys() == LOGITS_TOLERANCE.keys() and all(passed.values())
    print("\nPASS" if ok else "\nFAIL", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
