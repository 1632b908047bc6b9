"""How ranks find each other: the bootstrap description, the exchange of window handles, and the sharing of windows."""

from __future__ import annotations

import atexit
import logging
import pickle
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_moe_ep import _C
from torch_moe_ep.config import CommBackend
from torch_moe_ep.version import __version__


@dataclass
class BootstrapConfig:
    """The expert-parallel group; fields of ``flashinfer.moe_ep.BootstrapConfig``.

    Args:
        world_size: W, ranks of the group.
        rank: this rank.
        stream, auto_bootstrap, nccl_comm: accepted for compatibility; the one-sided backends need none of them.
        process_group: torch.distributed group over which handles are exchanged; None is the default group.
        tcp_store: exchange handles through this store instead, where torch.distributed is not initialised. Groups that
            share a server take a torch.distributed.PrefixStore each.
        device: CUDA device index; None is the current device.
    """

    world_size: int
    rank: int
    stream: int = 0
    auto_bootstrap: bool = True
    nccl_comm: int | None = None
    process_group: dist.ProcessGroup | None = None
    tcp_store: dist.Store | None = None
    device: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, least in (("world_size", 1), ("rank", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"BootstrapConfig.{name}: expected an int of at least {least}, got {value!r}")
        if self.rank >= self.world_size:
            raise ValueError(
                f"BootstrapConfig.rank: expected less than world_size = {self.world_size}, got {self.rank}"
            )


class TorchDistributedCommBackend:
    """Exchange over a torch.distributed process group (gloo, NCCL, ...)."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group

    def allgather(self, obj: Any) -> list[Any]:
        out: list[Any] = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(out, obj, group=self.process_group)
        return out

    def barrier(self) -> None:
        dist.barrier(group=self.process_group)


class StoreCommBackend:
    """Exchange through a torch.distributed store (TCPStore, FileStore), without a process group.

    The store itself counts each rank's steps, so that any number of communicators can be made through one store.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size

    def allgather(self, obj: Any) -> list[Any]:
        step = self.store.add(f"moe_ep/steps/{self.rank}", 1)
        keys = [f"moe_ep/{step}/{r}" for r in range(self.world_size)]
        self.store.set(keys[self.rank], pickle.dumps(obj))  # type: ignore[arg-type]  # bytes are allowed
        return [pickle.loads(self.store.get(key)) for key in keys]

    def barrier(self) -> None:
        self.allgather(None)


class _SingleRankCommBackend:
    def allgather(self, obj: Any) -> list[Any]:
        return [obj]

    def barrier(self) -> None:
        pass


def choose_comm_backend(bootstrap: BootstrapConfig, given: CommBackend | None) -> tuple[CommBackend, Any]:
    """The exchange to use, and what identifies the group it spans (kept alive by whoever keys on it)."""
    if given is not None:
        return given, given
    if bootstrap.tcp_store is not None:
        return StoreCommBackend(bootstrap.tcp_store, bootstrap.rank, bootstrap.world_size), bootstrap.tcp_store
    if bootstrap.world_size == 1 and bootstrap.process_group is None:
        return _SingleRankCommBackend(), "single rank"
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "bootstrap: torch.distributed is not initialised; call torch.distributed.init_process_group first, or pass "
            "BootstrapConfig(tcp_store=...) or a config with comm_backend=..."
        )
    group = bootstrap.process_group
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if (size, rank) != (bootstrap.world_size, bootstrap.rank):
        raise ValueError(
            f"BootstrapConfig: world_size={bootstrap.world_size}, rank={bootstrap.rank} is not what the process group "
            f"says (world size {size}, rank {rank}); pass the group of the expert-parallel ranks as process_group"
        )
    return TorchDistributedCommBackend(group), dist.group.WORLD if group is None else group


@dataclass(frozen=True)
class WindowSpec:
    """What ranks must agree on to share windows (see csrc/window.h)."""

    backend: str
    device: str
    ep_size: int
    enable_rank_mask: bool
    max_tokens: int
    max_top_k: int
    eplb_experts: int
    weight_itemsize: int
    dispatch_row_bytes: int
    combine_row_bytes: int
    version: str = __version__
    wire: str = "rows"  # how combine's partials travel: rows, fp8 or fp8_plain
    # GPUs only. Kinds of memory to try, best first; launch options.
    memory: tuple[str, ...] = ("shm",)
    pdl: bool = False
    num_sms: int | None = None
    lamport_max_tokens: int = 0  # 0: the Lamport transport is off
    counted: str = ""  # how counted writes are made: "" not at all, fabric (in windows of that kind alone), or emulated
    counted_max_tokens_for_dispatch: int = 0
    counted_max_tokens_for_combine: int = 0


@dataclass
class SharedWindow:
    """A live communicator and the number of objects that use it."""

    name: str
    order: torch.Tensor
    key: Any
    exchange: CommBackend
    max_blocks: int = 1
    early_blocks: int = 0
    users: int = 1
    suspended: bool = False


logger = logging.getLogger("torch_moe_ep")
_lock = threading.RLock()
_shared: dict[Any, SharedWindow] = {}
_next_number = 0


def _agree(exchange: CommBackend, step: str, run: Callable[[], Any], undo: Callable[[], None]) -> list[Any]:
    """Runs ``run`` and gathers its results; when it failed on any rank, undoes it and raises alike on all of them."""
    result, error = None, None
    try:
        result = run()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = f"{type(caught).__name__}: {caught}"
    gathered = exchange.allgather((result, error))
    failures = [f"rank {r}: {e}" for r, (_, e) in enumerate(gathered) if e is not None]
    if failures:
        undo()
        # What no rank could ever allocate is a wrong argument, not bad luck.
        wrong = all(e.startswith("ValueError") for _, e in gathered if e is not None)
        text = f"{step} failed on {len(failures)} of {len(gathered)} ranks: " + "; ".join(failures)
        raise ValueError(text) if wrong else RuntimeError(text)
    return [value for value, _ in gathered]


class _Proposal(NamedTuple):
    """What a rank says before a window is opened."""

    rank: int
    spec: WindowSpec
    namespace: str
    next_number: int
    shareable: str | None  # name of a live window of this layout
    name_is_taken: bool


def gather(exchange: CommBackend, rank: int, world_size: int, value: Any) -> list[Any]:
    """The values of all ranks by rank; ValueError for an exchange that returns anything else."""
    entries = exchange.allgather((rank, value))
    if not isinstance(entries, list | tuple) or len(entries) != world_size:
        count = len(entries) if isinstance(entries, list | tuple) else repr(entries)
        raise ValueError(f"comm_backend: allgather returned {count} entries for world_size {world_size}")
    ranks = [e[0] if isinstance(e, tuple) and len(e) == 2 else e for e in entries]
    if ranks != list(range(world_size)):
        raise ValueError(
            f"comm_backend: expected the entries of ranks 0..{world_size - 1} in order from allgather, "
            f"got those of {ranks!r:.200}"
        )
    return [value for _, value in entries]


def _exchange_proposals(exchange: CommBackend, mine: _Proposal) -> list[_Proposal]:
    """Those of all ranks by rank, once they agree about everything but the device."""
    proposals: list[_Proposal] = gather(exchange, mine.rank, mine.spec.ep_size, mine)
    here = {**asdict(mine.spec), "namespace": mine.namespace}
    for other in proposals:
        there = {**asdict(other.spec), "namespace": other.namespace}
        for what in here:
            if what != "device" and here[what] != there[what]:
                raise ValueError(
                    f"{what}: rank {mine.rank} has {here[what]!r}, rank {other.rank} has {there[what]!r}; "
                    "it must be the same on every rank"
                )
    return proposals


def open_window(
    spec: WindowSpec,
    bootstrap: BootstrapConfig,
    comm_backend: CommBackend | None,
    *,
    namespace: str = "",
    name_suffix: str = "",
) -> SharedWindow:
    """Opens this rank's window and connects it to its peers'. Collective.

    Equal layouts of one group share a window (every round is a self-contained collective); ``namespace`` asks for one
    of its own, as calls that run at once on two streams or threads need.

    Raises:
        ValueError: the ranks disagree about a size, or it is out of range; the text names it, the ranks and the values.
        RuntimeError: a rank could not allocate or map; everything is freed on all ranks and the text names the cause.
    """
    exchange, group = choose_comm_backend(bootstrap, comm_backend)
    key = (id(group), bootstrap.rank, spec, namespace, name_suffix)
    with _lock:
        cached = _shared.get(key)
    shareable = cached.name if cached is not None and not _C.describe(cached.name)["last_error"] else None
    # A communicator with a namespace of its own gets its name back when it is created anew, so that graphs and packages
    # that hold the name go on; numbers make all others unique.
    wished = f"{spec.backend}.{spec.ep_size}.{namespace}{name_suffix}" if namespace else None

    mine = _Proposal(bootstrap.rank, spec, namespace, _next_number, shareable, wished in _C.names())
    proposals = _exchange_proposals(exchange, mine)
    if cached is not None and all(p.shareable == mine.shareable is not None for p in proposals):
        cached.users += 1
        return cached
    number = _take_number(max(p.next_number for p in proposals))
    # Equal on all ranks, so that a graph compiled by one can be loaded from the cache by another.
    name = f"{spec.backend}.{spec.ep_size}.{number}{name_suffix}"
    if wished is not None and not any(p.name_is_taken for p in proposals):
        name = wished
    device = torch.device(spec.device)

    def close() -> None:
        _C.close(name)

    def attempt(memory: str, counted: str) -> tuple[int, int]:
        def allocate() -> tuple[bytes, tuple[str, int]]:
            handle = _C.open(
                name=name,
                rank=bootstrap.rank,
                ep_size=spec.ep_size,
                device=device.type,
                device_index=device.index or 0,
                memory=memory,
                enable_rank_mask=spec.enable_rank_mask,
                pdl=spec.pdl,
                max_tokens=spec.max_tokens,
                max_top_k=spec.max_top_k,
                eplb_experts=spec.eplb_experts,
                weight_itemsize=spec.weight_itemsize,
                dispatch_row_bytes=spec.dispatch_row_bytes,
                combine_row_bytes=spec.combine_row_bytes,
                wire=spec.wire,
                lamport_max_tokens=spec.lamport_max_tokens,
                counted=counted,
                counted_max_tokens_for_dispatch=spec.counted_max_tokens_for_dispatch if counted else 0,
                counted_max_tokens_for_combine=spec.counted_max_tokens_for_combine if counted else 0,
            )
            return handle, device_share(device, spec.num_sms, counted)

        try:
            allocated = _agree(exchange, f"allocating the windows ({memory})", allocate, close)
            handles = [handle for handle, _ in allocated]
            shares = [share for _, share in allocated]
            max_blocks = common_blocks(shares)
            # The next kernel's blocks need room too. Whoever divides a device by hand leaves room for two of ours.
            sharing = sum(identity == shares[bootstrap.rank][0] for identity, _ in shares)
            alone = sharing == 1 and spec.num_sms is None
            early_blocks = max_blocks if alone else 0 if spec.num_sms is None else max_blocks // 2
            _agree(
                exchange,
                f"connecting the windows ({memory})",
                lambda: _C.connect(name, handles, max_blocks, early_blocks),
                close,
            )
            _C.seal(name)
            return max_blocks, early_blocks
        except BaseException:
            close()
            raise

    attempts = [(memory, "") for memory in spec.memory]
    if spec.counted == "emulated":
        attempts = [(memory, spec.counted) for memory in spec.memory]
    elif spec.counted and "fabric" in spec.memory:  # windows without endpoints are better than none
        attempts.insert(spec.memory.index("fabric"), ("fabric", spec.counted))
    failures = []
    for memory, counted in attempts:
        try:
            blocks = attempt(memory, counted)
            break
        except RuntimeError as error:  # raised alike on all ranks, so that all of them try the next kind
            failures.append(str(error))
            if bootstrap.rank == 0 and len(attempts) > 1:
                logger.info("%s: no %s memory%s: %s", name, memory, " with endpoints" if counted else "", error)
    else:
        raise RuntimeError("; ".join(failures))
    window = SharedWindow(name, torch.zeros(1, device=device), (key, group), exchange, *blocks)
    with _lock:
        _shared[key] = window
    return window


def device_share(device: torch.device, num_sms: int | None, counted: str = "") -> tuple[str, int]:
    """What identifies a device among all hosts, and the thread blocks it gives to the ranks that live on it."""
    if device.type == "cpu":
        return "cpu", 1
    blocks = _C.resident_blocks(device.index, counted)
    properties = torch.cuda.get_device_properties(device)
    if num_sms is not None:
        blocks = max(1, blocks * num_sms // properties.multi_processor_count)
        return f"{properties.uuid}/{uuid.uuid4()}", min(blocks, _C.MAX_BLOCKS)  # the caller has done the sharing
    return str(properties.uuid), min(blocks, _C.MAX_BLOCKS)


def common_blocks(shares: Sequence[tuple[str, int]]) -> int:
    """Blocks of a kernel of a rank, at most, given what :func:`device_share` says on all ranks.

    All blocks of all ranks of a device must be resident at once, or they wait for each other forever. While one rank's
    blocks wait for a peer, the kernels that the peer runs first, of any kind, must find room too, and some of them take
    a whole SM: so where ranks share a device, which holds two blocks per SM, they leave a quarter of the SMs free of
    blocks that wait. Block b of a rank exchanges with block b of its peers: the smallest share counts for everybody.
    """
    smallest = []
    for mine, blocks in shares:
        ranks = sum(identity == mine for identity, _ in shares)
        smallest.append(blocks if ranks == 1 else max(1, blocks * 3 // 8 // ranks))
    return min(smallest)


def _take_number(at_least: int) -> int:
    """The same number on every rank, never used twice in a process."""
    global _next_number
    with _lock:
        _next_number = max(_next_number, at_least + 1)
    return at_least


def close_window(window: SharedWindow) -> None:
    """Gives up one use; the last one unmaps and frees. Does not wait for peers: what they have mapped stays valid."""
    with _lock:
        window.users -= 1
        if window.users > 0:
            return
        if _shared.get(window.key[0]) is window:
            del _shared[window.key[0]]
    _C.close(window.name)


def suspend_window(window: SharedWindow) -> None:
    """Gives the physical memory back on every rank and keeps every address. Collective; no op may be running."""
    if window.suspended:
        return
    # A peer's last op may still be reading from this window, or writing into it, when this rank's has ended.
    _agree(window.exchange, "waiting for the device", lambda: _synchronize(window.order.device), lambda: None)
    _agree(window.exchange, "unmapping the windows", lambda: _C.suspend(window.name), lambda: None)
    window.suspended = True


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resume_window(window: SharedWindow) -> None:
    """Puts fresh memory behind the addresses and maps the peers' again. Collective."""
    if not window.suspended:
        return
    handles = _agree(window.exchange, "allocating the windows again", lambda: _C.resume(window.name), lambda: None)
    _agree(
        window.exchange,
        "connecting the windows again",
        lambda: _C.connect(window.name, handles, window.max_blocks, window.early_blocks),
        lambda: None,
    )
    window.suspended = False


@atexit.register
def _close_all() -> None:
    for name in _C.names():
        _C.close(name)
