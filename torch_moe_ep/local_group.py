"""W ranks in one process, one thread each: for tests, and for benchmarks on a single device."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from torch_moe_ep.bootstrap import BootstrapConfig
from torch_moe_ep.communication import MoEEpCommunication, create_communication
from torch_moe_ep.params import MoEEpCommParams

_groups = itertools.count()


class _Rendezvous:
    """allgather and barrier between the threads of a local group."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.meet = threading.Barrier(size, timeout=60)


class _LocalCommBackend:
    def __init__(self, rendezvous: _Rendezvous, rank: int) -> None:
        self.rendezvous, self.rank = rendezvous, rank

    def allgather(self, obj: Any) -> list[Any]:
        self.rendezvous.slots[self.rank] = obj
        self.rendezvous.meet.wait()
        gathered = list(self.rendezvous.slots)
        self.rendezvous.meet.wait()  # nobody writes the next object before all have read this one
        return gathered

    def barrier(self) -> None:
        self.rendezvous.meet.wait()


def create_local_group(
    ep_size: int, params: MoEEpCommParams, backend: Any = "shm_one_sided", **options: Any
) -> list[MoEEpCommunication]:
    """One communication object per rank, all in this process, each with windows of its own.

    Args:
        ep_size: W.
        params, backend, options: as for :func:`create_communication`.

    A rank's ops wait for the others': run each rank in its own thread, e.g. by :func:`run_local_group`. On a GPU, join
    the stream (``torch.cuda.current_stream().synchronize()``) before anything that copies to the host (``.cpu()``,
    ``.item()``, ``print``): such a copy holds a lock of the driver while it waits, and the other threads' launches, for
    which the kernel before it waits, need that lock.
    """
    from torch_moe_ep.config import NVLinkOneSidedConfig, ShmOneSidedConfig

    defaults = {"shm_one_sided": ShmOneSidedConfig, "nvlink_one_sided": NVLinkOneSidedConfig}
    if ep_size < 1:
        raise ValueError(f"ep_size: expected at least 1, got {ep_size}")
    if isinstance(backend, str) and backend not in defaults:
        raise ValueError(f"backend: expected one of {sorted(defaults)} or a config object, got {backend!r}")
    if not isinstance(backend, str) and not hasattr(backend, "comm_backend"):
        raise ValueError(
            f"backend: {type(backend).__name__} needs a process group, so one process per rank; expected one of "
            f"{sorted(defaults)} or a config with comm_backend"
        )
    rendezvous = _Rendezvous(ep_size)
    number = next(_groups)
    base = defaults[backend]() if isinstance(backend, str) else backend

    def make(rank: int) -> MoEEpCommunication:
        config = type(base)(**{**vars(base), "comm_backend": _LocalCommBackend(rendezvous, rank)})
        bootstrap = BootstrapConfig(world_size=ep_size, rank=rank)
        return create_communication(bootstrap, params, config, _name_suffix=f".local{number}.{rank}", **options)

    return run_local_group(ep_size, make)


def run_local_group(ep_size: int, function: Callable[[int], Any]) -> list[Any]:
    """Runs ``function(rank)`` in one thread per rank; returns the results by rank, raises the first error.

    Where CUDA is in use, each thread has a stream of its own, since kernels of different ranks wait for each other; it
    begins after what the caller's stream holds, and the caller's stream goes on after it.
    """
    on_gpu = torch.cuda.is_initialized()
    caller = torch.cuda.current_stream() if on_gpu else None

    def run(rank: int) -> Any:
        if caller is None:
            return function(rank)
        torch.cuda.set_device(caller.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            result = function(rank)
        finished.append(stream)
        return result

    finished: list[torch.cuda.Stream] = []
    with ThreadPoolExecutor(max_workers=ep_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(ep_size)]
        for done in as_completed(futures):  # the first error in time: later ones may be waits for that rank
            done.result()
    for stream in finished:
        assert caller is not None
        caller.wait_stream(stream)
    return [future.result() for future in futures]
