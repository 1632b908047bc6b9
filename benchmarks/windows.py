"""Bytes of a rank's window as the communicator says, beside the formula: C*B + C*min(K, W)*H*2 and the routing."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.harness import Results, parser
from torch_moe_ep import BootstrapConfig, MoEEpCommParams, QuantFormat, ShmOneSidedAlltoAll, ShmOneSidedConfig

SHAPES = [  # W, C, H, K, format of dispatched rows
    (4, 16, 4096, 8, QuantFormat.BF16),
    (4, 256, 4096, 8, QuantFormat.BF16),
    (4, 2048, 4096, 8, QuantFormat.BF16),
    (8, 1024, 7168, 8, QuantFormat.BF16),
    (8, 1024, 7168, 8, QuantFormat.MXFP8),
    (64, 128, 7168, 8, QuantFormat.BF16),
    (64, 1024, 7168, 8, QuantFormat.BF16),
    (64, 1024, 7168, 8, QuantFormat.NVFP4),
    (256, 256, 7168, 8, QuantFormat.BF16),
]


class Alone:
    """Plays all ranks of a group in one process: every peer's window is this one, mapped again. Nothing is sent."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def allgather(self, obj: Any) -> list[Any]:
        return [obj] * self.world_size

    def barrier(self) -> None:
        pass


def main() -> None:
    a = parser(__doc__).parse_args()
    results = Results("windows", a.out)
    for w, c, h, k, row_format in SHAPES:
        params = MoEEpCommParams(256, k, c, h, torch.bfloat16, row_format)
        comm = ShmOneSidedAlltoAll(BootstrapConfig(w, 0), params, ShmOneSidedConfig(comm_backend=Alone(w)))
        b = params.dispatch_bytes_per_token
        rows = c * b + c * min(k, w) * h * 2
        routing = w * c * k * 8  # int32 ids and float32 weights, from every rank
        results.emit(
            ranks=w, capacity=c, hidden_size=h, top_k=k, row_format=row_format.name,
            window_bytes=comm.window_bytes,
            formula_rows_bytes=rows, formula_routing_bytes=routing,
            beyond_formula_bytes=comm.window_bytes - rows - routing,
            # A slot for every token of every rank in both directions, for comparison.
            all_slots_bytes=w * c * (b + h * 2),
        )
        comm.destroy()


if __name__ == "__main__":
    main()
