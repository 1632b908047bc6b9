"""What programmatic dependent launch gains: a compiled chain of Triton kernels and ops, replayed as a CUDA graph.

Each of the layers is pointwise work that Inductor makes a Triton kernel of, dispatch, more pointwise work, combine;
one rank, so that the figure is launches and not waiting. Four rows: our attribute on and off, Inductor's own
(``torch._inductor.config.triton.enable_pdl``) on and off.

    python -m benchmarks.cuda_pdl [--tokens 16] [--layers 8] [--out benchmarks/results/cuda_pdl.jsonl]
"""

from __future__ import annotations

import itertools
import statistics

import torch
import torch._inductor.config as inductor

from benchmarks.cuda_pair import time_graph
from benchmarks.harness import Results, parser
from torch_moe_ep import MoEEpCommParams, NVLinkOneSidedConfig, combine, create_local_group, dispatch


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=16)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--hidden", type=int, default=7168)
    args = options.parse_args()
    results = Results("cuda_pdl", args.out)
    x = torch.randn(args.tokens, args.hidden, device="cuda").bfloat16()
    ids = torch.randint(64, (args.tokens, 8), device="cuda")
    expected = None
    for ours, inductors in itertools.product((False, True), (False, True)):
        torch._dynamo.reset()
        params = MoEEpCommParams(64, 8, args.tokens, args.hidden)
        (group,) = create_local_group(1, params, NVLinkOneSidedConfig(enable_pdl=ours))

        @torch.compile(fullgraph=True)
        def chain(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            for _ in range(args.layers):
                received = dispatch(group, torch.tanh(x) + 1, ids)  # noqa: B023
                rows = torch.sin(received.hidden_states) * 2
                x = combine(group, rows, received.routing, num_tokens=args.tokens)  # noqa: B023
            return x

        with inductor.patch({"triton.enable_pdl": inductors}):
            got = chain(x, ids)
            expected = got if expected is None else expected
            assert torch.equal(got, expected), "the result depends on how kernels are launched"
            us = statistics.median(time_graph(lambda: chain(x, ids), 50)) / args.layers  # noqa: B023
        results.emit(gpu=torch.cuda.get_device_name(), tokens=args.tokens, hidden=args.hidden, layers=args.layers,
                     enable_pdl=ours, inductor_enable_pdl=inductors, us_per_layer=round(us, 2))
        group.destroy()


if __name__ == "__main__":
    main()
