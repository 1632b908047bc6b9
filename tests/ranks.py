"""Pools of rank processes, kept alive across tests: importing torch once is cheap, once per rank and test is not.

A test hands a pool a function of its own module; every process runs it with its :class:`Rank` and sends the result
back. An exception in any rank fails the test with that rank's traceback.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch_moe_ep"])


@dataclass
class Rank:
    """What a function that runs in a pool knows of its process."""

    rank: int
    world_size: int
    device: torch.device


class RankError(AssertionError):
    """A rank raised; ``rank`` is the first that did, ``error`` its exception's ``Type: text``."""

    def __init__(self, rank: int, error: str, trace: str) -> None:
        super().__init__(f"rank {rank} raised:\n{trace}")
        self.rank, self.error = rank, error


class RankPool:
    """``world_size`` processes with a gloo process group between them.

    Args:
        world_size: number of processes.
        device: "cpu", or "cuda": then all of them use CUDA device ``rank % device_count``.
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size = world_size
        self._store = tempfile.NamedTemporaryFile(prefix="moe_ep_ranks_")
        self._connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(there, rank, world_size, device, self._store.name), daemon=True
            )
            process.start()
            there.close()
            self._connections.append(here)
            self.processes.append(process)
        self.alive = True

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """``function(Rank, *args)`` on every rank; results by rank. Raises :class:`RankError` or TimeoutError."""
        outcomes = self.outcomes(function, *args, timeout=timeout, grace=1)
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, RankError):
                raise RankError(rank, outcome.error, outcome.args[0])
        return outcomes

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 120, grace: float | None = None
    ) -> list[Any]:
        """Like :meth:`run`, with a :class:`RankError` in the place of the result of a rank that raised or died.

        With ``grace``, ranks that have not finished so many seconds after another one raised are ended, and None is
        their result: they wait for what will not come.
        """
        request = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(request)
        outcomes: list[Any] = [None] * self.world_size
        pending = dict(zip(self._connections, range(self.world_size), strict=True))
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and grace is not None and any(isinstance(outcome, RankError) for outcome in outcomes):
                self.close(kill=True)
                return outcomes
            if not ready:
                missing = sorted(pending.values())
                self.close()
                raise TimeoutError(f"ranks {missing} did not finish {function.__name__} within {timeout} s")
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[arg-type, index]
                try:
                    ok, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    self.alive = False
                    ok, value = False, ("died", "the process died")
                outcomes[rank] = value if ok else RankError(rank, *value)
                if not ok and grace is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        return outcomes

    def close(self, kill: bool = False) -> None:
        """Ends the processes, which take their leave unless ``kill``. Idempotent."""
        self.alive = False
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            if kill:
                process.kill()
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._store.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(connection: Connection, rank: int, world_size: int, device: str, store: str) -> None:
    torch.set_num_threads(1)
    where = torch.device(device)
    if device == "cuda":
        where = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    me = Rank(rank, world_size, where)
    while True:
        try:
            function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            reply = pickle.dumps((True, function(me, *args)))
        except BaseException as error:
            reply = pickle.dumps((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))
        connection.send_bytes(reply)
