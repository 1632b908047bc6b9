# The control plane, ops/control.cpp, where the docstrings are.
from collections.abc import Sequence
from typing import Any

MAX_TOP_K: int
MAX_TOKENS: int
MAX_RANKS: int
has_cuda: bool

def open(
    *,
    name: str,
    rank: int,
    ep_size: int,
    device: str,
    device_index: int,
    memory: str = "shm",
    enable_rank_mask: bool,
    pdl: bool = False,
    max_tokens: int,
    max_top_k: int,
    eplb_experts: int,
    weight_itemsize: int,
    dispatch_row_bytes: int,
    combine_row_bytes: int,
    wire: str = "rows",
    lamport_max_tokens: int = 0,
    counted: str = "",
    counted_max_tokens_for_dispatch: int = 0,
    counted_max_tokens_for_combine: int = 0,
) -> bytes: ...
def connect(name: str, handles: Sequence[bytes], max_blocks: int = 1, early_blocks: int = 0) -> None: ...
def seal(name: str, /) -> None: ...
def suspend(name: str, /) -> None: ...
def resume(name: str, /) -> bytes: ...
def close(name: str, /) -> None: ...
def names() -> list[str]: ...
def describe(name: str, /) -> dict[str, Any]: ...
def set_active_ranks(name: str, ranks: Sequence[int], /) -> None: ...
def set_delay(name: str, point: str, usec: int, /) -> None: ...
def fp8_row_bytes(hidden_size: int) -> int: ...

# Only where has_cuda.
MAX_BLOCKS: int

def resident_blocks(device_index: int, counted: str = "") -> int: ...
def force_plan(name: str, groups: int, pieces: int, threads: int, descending: bool = True) -> None: ...
def counted_probe(device_index: int) -> dict[str, Any]: ...
