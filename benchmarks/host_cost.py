"""Host cost of one op call in microseconds, by the way it is called: one rank and one short row, so no work is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor_config

import torch_moe_ep
from benchmarks.harness import Results, parser, summary, time_interleaved
from torch_moe_ep import BootstrapConfig, MoEEpCommParams, create_communication

SHORT, LONG = 8, 40
"""Pairs in the two compiled graphs whose difference is taken, so that guards and the call of the graph drop out."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--seconds", type=float, default=0.1, help="per repeat and way")
    a = options.parse_args()
    torch.set_num_threads(1)
    group = create_communication(BootstrapConfig(1, 0), MoEEpCommParams(4, 2, 1, 16), "shm_one_sided")
    x = torch.randn(1, 16, dtype=torch.bfloat16)
    ids, weights = torch.tensor([[0, 3]], dtype=torch.int32), torch.tensor([[0.75, 0.25]])

    def ops() -> torch.Tensor:
        hidden, *_, routing = torch.ops.moe_ep.dispatch(
            x, ids, weights, None, group.order, tokens_per_rank=1, num_experts=4, ep_size=1, comm=group.comm
        )
        return torch.ops.moe_ep.combine(hidden, routing, group.order, num_tokens=1, ep_size=1, comm=group.comm)

    def functions(rows: torch.Tensor = x) -> torch.Tensor:
        received = torch_moe_ep.dispatch(group, rows, ids, weights)
        return torch_moe_ep.combine(group, received.hidden_states, received.routing, num_tokens=1)

    def classes() -> torch.Tensor:
        return group.combine(group.dispatch(x, ids, weights).hidden_states)

    def compiled(pairs: int) -> Callable[[], Any]:
        def chain(rows: torch.Tensor) -> torch.Tensor:
            for _ in range(pairs):
                rows = functions(rows)
            return rows

        graph = torch.compile(chain, fullgraph=True)
        with torch.inference_mode():
            graph(x)
        return lambda: graph(x)

    pairs = {"torch.ops": (ops, None), "functions": (functions, None), "class": (classes, None)}
    for name, cpp_wrapper in (("compiled", False), ("compiled, cpp_wrapper", True)):
        with inductor_config.patch(cpp_wrapper=cpp_wrapper):
            torch._dynamo.reset()
            pairs[name] = (compiled(LONG), compiled(SHORT))

    runs = {name: run for name, (run, _) in pairs.items()}
    runs |= {f"{name}/short": short for name, (_, short) in pairs.items() if short}
    with torch.inference_mode():
        taken = time_interleaved(runs, a.repeats, a.seconds, lambda: None)
    results = Results("host_cost", a.out)
    for name, (_, short) in pairs.items():
        us = [t / 2 for t in taken[name]]
        if short:
            us = [(t - s) / (2 * (LONG - SHORT)) for t, s in zip(taken[name], taken[f"{name}/short"], strict=True)]
        results.emit(way=name, repeats=a.repeats, per="op call, mean of dispatch and combine", **summary(us))


if __name__ == "__main__":
    main()
