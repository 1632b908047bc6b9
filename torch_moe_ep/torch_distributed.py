"""Dispatch and combine over torch.distributed (NCCL, gloo): any number of hosts, and an oracle of the others."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from torch_moe_ep.alternation import AlternatingAlltoAll
from torch_moe_ep.bootstrap import BootstrapConfig, choose_comm_backend
from torch_moe_ep.collectives import Collective, close_collective, open_collective
from torch_moe_ep.communication import register_communication
from torch_moe_ep.config import TorchDistributedConfig, check_config
from torch_moe_ep.params import MoEEpCommParams
from torch_moe_ep.version import __version__


@register_communication("torch_distributed")
class TorchDistributedAlltoAll(AlternatingAlltoAll):
    """The interface and the bits of the one-sided backends, through collectives of a process group.

    Every op is one ``all_to_all_single`` of static shape: a dispatch sends W*R records from every rank, a combine W*R
    rows, wherever the tokens go. No memory is held between ops, so K and the bytes of a row are not limited here, and
    ops of several communicators of one process group may follow each other in any order that all ranks share. Traced by
    ``torch.compile``, it is plain torch and functional collectives.

    Args:
        bootstrap: the group; ``process_group`` is the one that carries the rows (None is the default group). A single
            rank needs none. Tensors live on the GPU ``device`` where that is given or the group has NCCL for CUDA, else
            on the CPU.
        params: its sizes, the same on every rank.
        config: a :class:`TorchDistributedConfig`; None is its defaults.
        namespace: becomes part of ``comm``. Ops that run at once on two threads or streams need two process groups.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: the ranks disagree about the sizes; the text names them, the ranks and the values.
    """

    config: TorchDistributedConfig

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: TorchDistributedConfig | None = None,
        *,
        namespace: str = "",
    ) -> None:
        config = check_config(TorchDistributedConfig, config)
        super().__init__(bootstrap, params)
        if bootstrap.tcp_store is not None and not dist.is_initialized():
            raise RuntimeError(
                "BootstrapConfig.tcp_store: the torch_distributed backend sends rows through a process group; call "
                "torch.distributed.init_process_group(store=...) with this store first"
            )
        exchange, group = choose_comm_backend(replace(bootstrap, tcp_store=None), None)
        self._group_name: str | None = group.group_name if isinstance(group, dist.ProcessGroup) else None
        backends = "none" if self._group_name is None else dist.get_backend_config(group)
        self.device = torch.device("cpu")
        if bootstrap.device is not None or "cuda:nccl" in backends:
            index = torch.cuda.current_device() if bootstrap.device is None else bootstrap.device
            self.device = torch.device("cuda", index)
        check_steps = self.device.type == "cpu" if config.check_steps is None else config.check_steps
        mine = {**asdict(params), "check_steps": check_steps, "namespace": namespace, "version": __version__}
        for rank, theirs in enumerate(exchange.allgather(mine)):
            for what in mine:
                if theirs.get(what) != mine[what]:
                    raise ValueError(
                        f"{what}: rank {self.ep_rank} has {mine[what]!r}, rank {rank} has {theirs.get(what)!r}; it "
                        "must be the same on every rank"
                    )
        self.config = replace(config, check_steps=check_steps)
        parts = (self.backend_name, self.ep_size, self._group_name, "checked" if check_steps else "", namespace)
        self.comm = ".".join(str(part) for part in parts if part)
        self.order = torch.zeros(1, device=self.device)
        open_collective(self.comm, Collective(self._group_name, check_steps))

    @classmethod
    def is_platform_supported(cls) -> bool:
        return cls.unsupported_reason() is None

    @classmethod
    def unsupported_reason(cls) -> str | None:
        if not dist.is_available():
            return "this torch was built without torch.distributed"
        if not (dist.is_gloo_available() or dist.is_nccl_available()):
            return "this torch has neither gloo nor NCCL"
        return None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that carries the rows; None for a single rank, which needs none.

        It is found by its name: with a reference, the group and its threads would outlive ``destroy_process_group()``,
        and run into the interpreter's end.
        """
        if self._group_name is None:
            return None
        return dist.distributed_c10d._resolve_process_group(self._group_name)  # type: ignore[arg-type]

    def describe(self) -> dict[str, Any]:
        """Name, sizes and process group of the communicator, for people."""
        self._require_live()
        return {
            "name": self.comm,
            "rank": self.ep_rank,
            "ep_size": self.ep_size,
            "device": str(self.device),
            "process_group": self._group_name,
            "backend": None if self._group_name is None else dist.get_backend(self.process_group),
            "check_steps": self.config.check_steps,
        }

    def destroy(self) -> None:
        """Forgets the communicator; the process group stays. Idempotent; call it on every rank."""
        if not self._destroyed:
            close_collective(self.comm)
        self._mark_destroyed()
