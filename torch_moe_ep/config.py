"""Options of the backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

Config = TypeVar("Config")


@runtime_checkable
class CommBackend(Protocol):
    """What exchanges the window handles when a communicator is built; nothing else goes through it."""

    def allgather(self, obj: Any) -> list[Any]:
        """The objects of all ranks, by rank."""
        ...

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        ...


def _check_int(owner: str, name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{owner}.{name}: expected an int, got {value!r}")
    if value < least:
        raise ValueError(f"{owner}.{name}: expected at least {least}, got {value}")


def _check_bool(owner: str, name: str, value: Any, optional: bool) -> None:
    if not isinstance(value, bool) and not (optional and value is None):
        raise TypeError(f"{owner}.{name}: expected True{', False or None' if optional else ' or False'}, got {value!r}")


def _check_comm_backend(owner: str, value: Any) -> None:
    if value is not None and not isinstance(value, CommBackend):
        raise TypeError(f"{owner}.comm_backend: expected an object with allgather(obj) and barrier(), got {value!r}")


@dataclass
class NVLinkOneSidedConfig:
    """Options of :class:`~torch_moe_ep.NVLinkOneSidedAlltoAll`; names, types and defaults of FlashInfer's class.

    Args:
        backend_name: the registered name of the backend.
        extra_payload_bytes_per_token: bytes reserved in a dispatched row beyond the activations.
        eplb_stats_num_experts: entries of the EPLB statistics that a dispatch can all-gather; 0 = none.
        enable_rank_mask: whether steps may pass ``active_rank_mask``.
        use_low_precision_combine: send combine payloads as FP8.
        comm_backend: exchanges memory handles; None uses torch.distributed over the bootstrap's process group.
        cft: counted writes: None = where every rank supports them, up to the two limits below; True = for every step
            where supported; False = never.
        cft_max_tokens_for_dispatch: busiest rank's tokens up to which ``cft=None`` dispatches with counted writes.
        cft_max_tokens_for_combine: the same for combine.
        lamport: the small-step transport: None = on unless ``cft=True``; True = on, refuses ``cft=True``; False = off.
        lamport_max_tokens: largest step it takes, the same on every rank; None = chosen by the backend.
        timeout_sec: bounds every wait on a peer, in nominal seconds (of a 2 GHz clock on a GPU); recorded into graphs.
        enable_pdl: launch with programmatic dependent launch; None = on from compute capability 9.0.

    Raises:
        TypeError, ValueError: the text names the option and what was expected.
    """

    backend_name: str = "nvlink_one_sided"
    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    comm_backend: CommBackend | None = None
    cft: bool | None = None
    cft_max_tokens_for_dispatch: int = 128
    cft_max_tokens_for_combine: int = 128
    lamport: bool | None = None
    lamport_max_tokens: int | None = None
    timeout_sec: int = 300
    enable_pdl: bool | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name, least in (
            ("extra_payload_bytes_per_token", 0),
            ("eplb_stats_num_experts", 0),
            ("cft_max_tokens_for_dispatch", 0),
            ("cft_max_tokens_for_combine", 0),
            ("timeout_sec", 1),
        ):
            _check_int(owner, name, getattr(self, name), least)
        if self.lamport_max_tokens is not None:
            _check_int(owner, "lamport_max_tokens", self.lamport_max_tokens, 1)
        for name, optional in (
            ("enable_rank_mask", False),
            ("use_low_precision_combine", False),
            ("cft", True),
            ("lamport", True),
            ("enable_pdl", True),
        ):
            _check_bool(owner, name, getattr(self, name), optional)
        _check_comm_backend(owner, self.comm_backend)
        if self.lamport is True and self.cft is True:
            raise ValueError(f"{owner}.lamport: True cannot be combined with cft=True; leave one of them None")


@dataclass
class ShmOneSidedConfig:
    """Options of :class:`~torch_moe_ep.ShmOneSidedAlltoAll`: those of NVLinkOneSidedConfig that apply on CPU."""

    backend_name: str = "shm_one_sided"
    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    comm_backend: CommBackend | None = None
    timeout_sec: int = 300

    def __post_init__(self) -> None:
        owner = type(self).__name__
        _check_int(owner, "extra_payload_bytes_per_token", self.extra_payload_bytes_per_token, 0)
        _check_int(owner, "eplb_stats_num_experts", self.eplb_stats_num_experts, 0)
        _check_int(owner, "timeout_sec", self.timeout_sec, 1)
        _check_bool(owner, "enable_rank_mask", self.enable_rank_mask, optional=False)
        _check_bool(owner, "use_low_precision_combine", self.use_low_precision_combine, optional=False)
        _check_comm_backend(owner, self.comm_backend)


@dataclass
class TorchDistributedConfig:
    """Options of :class:`~torch_moe_ep.TorchDistributedAlltoAll`.

    Waits are bounded by the timeout of the process group (``timeout=`` of ``torch.distributed.init_process_group`` and
    ``new_group``), so there is no ``timeout_sec`` here; rank masks and windows do not exist.

    Args:
        backend_name: the registered name of the backend.
        check_steps: whether every op begins with an all-gather of 9 integers, by which ranks that disagree about the
            step (R, K, E, row bytes, the op itself) all raise, before anything else is sent. Without it such a step
            gives garbage, hangs, or ends the process, as the collective library has it. On a GPU the check costs a host
            sync and cannot be recorded in a CUDA graph. None = on for CPU tensors, off for CUDA.
    """

    backend_name: str = "torch_distributed"
    check_steps: bool | None = None

    def __post_init__(self) -> None:
        _check_bool(type(self).__name__, "check_steps", self.check_steps, optional=True)


def check_config(kind: type[Config], config: Config | None) -> Config:
    """``config``, or the defaults of its class."""
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"config: expected a {kind.__name__} or None, got {config!r}")
    return kind() if config is None else config
