"""Time of a dispatch + combine pair on a GPU: W ranks in one process, chained rounds in one CUDA graph.

Every rank is a branch of the graph, no rank waits for the host between rounds; the figure is the median over replays
of the time of a replay divided by its rounds. Inputs: H=7168, K=8, E=256, bfloat16 rows, int32 ids, float32 weights,
PDL on, unless told otherwise. The byte floor counts what this design moves through device memory; the copy ceiling is
measured in the same run.

    python -m benchmarks.cuda_pair [--cases 8x1,1x4096] [--transport lamport] [--plan GROUPSxPIECESxTHREADS]
"""

from __future__ import annotations

import argparse
import functools
import statistics
from typing import Any

import torch

import torch_moe_ep
from benchmarks.harness import Results, parser
from torch_moe_ep import MoEEpCommParams, NVLinkOneSidedConfig, create_local_group
from torch_moe_ep.functional import combine, dispatch

CASES = "8x1,8x8,8x32,8x64,4x64,4x128,2x256,1x256,1x4096,1x16384,8x512"
# Of flashinfer-python 0.7.4 (fence, Lamport) and of the first sketch of this design, us, on one H200 by this method.
PEER = {
    "8x1": (22.0, 11.0, 14.8), "8x8": (24.0, 15.9, 17.2), "8x32": (41.2, None, 33.5), "8x64": (61.3, None, 57.2),
    "4x64": (30.8, None, 25.3), "4x128": (46.2, None, 42.5), "2x256": (30.5, None, 29.3), "1x256": (13.9, None, 15.3),
    "1x4096": (108.8, None, 83.5), "8x512": (None, None, 412.8),
}


def copy_ceiling() -> float:
    """TB/s, read plus written, of a 256 MiB device-to-device copy."""
    x = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    times = time_graph(lambda: [y.copy_(x) for _ in range(4)], replays=20)
    return 2 * x.numel() / (statistics.median(times) / 4 * 1e-6) / 1e12


def time_graph(record: Any, replays: int) -> list[float]:
    """us of each replay of what ``record`` issues."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        record()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times


class Ranks:
    """W ranks of one GPU with their inputs."""

    def __init__(self, w: int, t: int, args: argparse.Namespace) -> None:
        self.w, self.t, self.hidden = w, t, args.hidden
        params = MoEEpCommParams(args.experts, args.top_k, t, args.hidden)
        lamport, counted = (args.transport == name and w > 1 for name in ("lamport", "emulated"))
        config = NVLinkOneSidedConfig(
            enable_pdl=args.pdl != 0, lamport=lamport, lamport_max_tokens=t if lamport else None, cft=counted
        )
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        # Nothing but these ranks runs, so they may share all SMs.
        self.group = create_local_group(
            w, params, config, num_sms=None if w == 1 else args.num_sms or sms // w, _emulate_cft=counted
        )
        enabled = self.group[0].lamport_enabled, self.group[0].cft_enabled  # type: ignore[attr-defined]
        assert enabled == (lamport, counted)
        if args.plan:
            for g in self.group:
                torch_moe_ep._C.force_plan(g.comm, *map(int, args.plan.split("x")))
        generator = torch.Generator(device="cuda").manual_seed(7)
        self.x = [torch.randn(t, args.hidden, device="cuda", generator=generator).bfloat16() for _ in range(w)]
        scores = [torch.rand(t, args.experts, device="cuda", generator=generator) for _ in range(w)]
        self.ids = [s.topk(args.top_k, dim=1).indices.int() for s in scores]
        self.weights = [torch.rand(t, args.top_k, device="cuda", generator=generator) for _ in range(w)]
        self.streams = [torch.cuda.Stream() for _ in range(w)]
        per_rank = -(-args.experts // w)
        self.targets = [  # distinct target ranks of every token (E divides by W here)
            torch.nn.functional.one_hot(ids.long() // per_rank, w).amax(1) for ids in self.ids
        ]

    def pair(self, rank: int, parts: str = "dc") -> torch.Tensor:
        g = self.group[rank]
        if parts == "dc":
            received = dispatch(g, self.x[rank], self.ids[rank], self.weights[rank])
            return combine(g, received.hidden_states, received.routing, num_tokens=self.t)
        if parts == "d":
            return dispatch(g, self.x[rank], self.ids[rank], self.weights[rank]).hidden_states
        return combine(g, self.kept[rank].hidden_states, self.kept[rank].routing, num_tokens=self.t)

    def branches(self, rounds: int, parts: str) -> None:
        """Issues `rounds` rounds of every rank, each rank on its own branch."""
        main = torch.cuda.current_stream()
        for rank, stream in enumerate(self.streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for _ in range(rounds):
                    self.pair(rank, parts)
        for stream in self.streams:
            main.wait_stream(stream)

    def check(self) -> None:
        """One eager round against the sum of copies, which float32 holds exactly."""
        outs = []
        self.kept = []
        torch.cuda.synchronize()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                self.kept.append(dispatch(self.group[rank], self.x[rank], self.ids[rank], self.weights[rank]))
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                kept = self.kept[rank]
                outs.append(combine(self.group[rank], kept.hidden_states, kept.routing, num_tokens=self.t))
        torch.cuda.synchronize()
        for x, out, targets in zip(self.x, outs, self.targets, strict=True):
            expected = (x.float() * targets.sum(1, keepdim=True)).bfloat16()
            assert torch.equal(out, expected), "combine(dispatch(x)) is not the sum of the copies"

    def floor_bytes(self) -> int:
        """Bytes read and written by all ranks in one pair: the passes over rows that this design makes."""
        row = self.hidden * 2
        copies = sum(int(t.sum()) for t in self.targets)
        own = sum(int(t[:, r].sum()) for r, t in enumerate(self.targets))
        remote, tokens = copies - own, self.w * self.t
        if self.w == 1:
            return (2 * copies + copies + tokens) * row
        dispatch_rows = 2 * tokens + 2 * copies  # stage, get
        combine_rows = 2 * remote + copies + tokens  # put, reduce
        return (dispatch_rows + combine_rows) * row

    def close(self) -> None:
        for g in self.group:
            g.destroy()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", default=CASES)
    options.add_argument("--hidden", type=int, default=7168)
    options.add_argument("--experts", type=int, default=256)
    options.add_argument("--top-k", type=int, default=8)
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--replays", type=int, default=20)
    options.add_argument("--pdl", type=int, default=1)
    options.add_argument("--plan", default="")
    options.add_argument("--transport", choices=("fence", "lamport", "emulated"), default="fence",
                         help="emulated: counted writes by stores")
    options.add_argument("--num-sms", type=int, default=0, help="of a rank; 0: an equal share of all")
    options.add_argument("--parts", default="dc,d,c", help="also time dispatch (d) and combine (c) alone, chained")
    args = options.parse_args()
    results = Results("cuda_pair", args.out)
    gpu = torch.cuda.get_device_name()
    ceiling = copy_ceiling()
    for case in args.cases.split(","):
        w, t = map(int, case.split("x"))
        ranks = Ranks(w, t, args)
        ranks.check()
        us = {}
        for parts in args.parts.split(","):
            times = time_graph(functools.partial(ranks.branches, args.rounds, parts), args.replays)
            us[parts] = statistics.median(times) / args.rounds
        ranks.check()
        fence, lamport, sketch = PEER.get(case, (None, None, None))
        floor = ranks.floor_bytes() / ceiling / 1e6
        results.emit(
            gpu=gpu, transport=args.transport, case=case, ranks=w, tokens=t, hidden=args.hidden, top_k=args.top_k,
            experts=args.experts, pdl=bool(args.pdl), plan=args.plan or None, rounds=args.rounds,
            us=round(us["dc"], 2), us_dispatch=round(us.get("d", 0), 2), us_combine=round(us.get("c", 0), 2),
            peer_fence_us=fence, ratio_to_peer_fence=fence and round(us["dc"] / fence, 3), peer_lamport_us=lamport,
            ratio_to_peer_lamport=lamport and round(us["dc"] / lamport, 3),
            sketch_us=sketch, bytes=ranks.floor_bytes(), floor_us=round(floor, 2),
            ceiling_fraction=round(floor / us["dc"], 3), copy_ceiling_tb_s=round(ceiling, 2),
            window_mib=round(ranks.group[0].window_bytes / 2**20, 2),
        )
        ranks.close()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
