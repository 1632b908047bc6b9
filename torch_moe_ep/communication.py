"""The communication classes: the interface every backend implements, and the registry that makes them by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torch_moe_ep.bootstrap import BootstrapConfig
from torch_moe_ep.params import MoEEpCommParams


@dataclass(frozen=True)
class MoEEpDispatchResult:
    """Rows received by a dispatch, rank-major: token t of rank s is row ``s * tokens_per_rank + t``.

    Attributes:
        hidden_states: ``[W*R, *]`` rows; unspecified where a row holds no token.
        topk_ids: ``[W*R, K]`` int32 global ids; every id is ``invalid_expert_id`` where a row holds no token.
        topk_weights: ``[W*R, K]``, or None where none were sent.
        tokens_per_rank: R of the step.
        hidden_states_scale: ``[W*R, *]``, or None.
        eplb_gathered_stats: ``[W, n]`` int32, or None.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    tokens_per_rank: int
    hidden_states_scale: torch.Tensor | None = None
    eplb_gathered_stats: torch.Tensor | None = None


class MoEEpCommunication(ABC):
    """Dispatch and combine over one expert-parallel group.

    Every :meth:`dispatch` is followed by exactly one :meth:`combine`, and all ranks issue the same sequence of calls.
    (The ops beneath, ``torch_moe_ep.dispatch`` and ``combine``, allow any sequence.)
    """

    backend_name: ClassVar[str]
    supports_cuda_graph: ClassVar[bool] = False

    comm: str
    """Name of the communicator, as the ops take it."""
    order: torch.Tensor
    """The 1-element tensor that keeps the ops of this communicator in program order."""
    timeout_sec: int = 300

    def __init__(self, bootstrap: BootstrapConfig, params: MoEEpCommParams) -> None:
        self.require_platform()
        self.bootstrap = bootstrap
        self.params = params
        self.ep_rank = bootstrap.rank
        self.ep_size = bootstrap.world_size
        self.local_experts = params.local_experts(self.ep_rank, self.ep_size)
        self.num_local_experts = len(self.local_experts)

    @classmethod
    @abstractmethod
    def is_platform_supported(cls) -> bool:
        """Whether this backend can run on this machine. Needs no instance and no peers."""

    @classmethod
    def require_platform(cls) -> None:
        """Raises RuntimeError with :meth:`unsupported_reason` where this backend cannot run."""
        if not cls.is_platform_supported():
            raise RuntimeError(
                f"{cls.__name__} cannot run on this machine: {cls.unsupported_reason() or 'not supported'}"
            )

    @classmethod
    def unsupported_reason(cls) -> str | None:
        """Why :meth:`is_platform_supported` is False, for people; None where it is True."""
        return None

    def is_workload_feasible(self, max_tokens_per_rank: int) -> bool:
        """Whether a step whose busiest rank dispatches this many tokens fits the windows."""
        return max_tokens_per_rank <= self.params.max_tokens_per_rank

    @abstractmethod
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
    ) -> MoEEpDispatchResult:
        """Sends each token to the ranks that own its experts.

        Args:
            hidden_states: ``[T, *]`` rows, of any dtype.
            topk_ids: ``[T, K]`` int32 or int64 global expert ids; ids outside ``[0, E)`` select nothing.
            topk_weights: ``[T, K]`` floating point, travels with the tokens. All ranks pass it or none does.
            hidden_states_scale: ``[T, *]`` scale factors, travel with the tokens. All ranks or none.
            runtime_max_tokens_per_rank: R, at least the largest T of the step over all ranks and equal on all of
                them; None is ``params.max_tokens_per_rank``. Fixed in a captured CUDA graph.
            eplb_local_stats: ``[n]`` int32, all-gathered. All ranks or none.
        """

    @abstractmethod
    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        """Sums each token's partial outputs on its source rank: ``[T, H]``.

        Args:
            expert_output: ``[W*R, H]`` or ``[W, R, H]``, one row per received row, already weighted and reduced over
                the local experts; rows that hold no token are not read.
            output: ``[T, H]`` tensor to write the result into (and to return).
        """

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor the experts may write their output into, or None. Valid between dispatch and combine."""
        return None

    def destroy(self) -> None:  # noqa: B027 - backends without resources need not override it
        """Releases the backend's resources. Idempotent; call it on every rank."""


_REGISTRY: dict[str, type[MoEEpCommunication]] = {}


def register_communication(name: str) -> Callable[[type[MoEEpCommunication]], type[MoEEpCommunication]]:
    """Class decorator: makes a :class:`MoEEpCommunication` available to :func:`create_communication` as ``name``."""

    def register(cls: type[MoEEpCommunication]) -> type[MoEEpCommunication]:
        cls.backend_name = name
        _REGISTRY[name] = cls
        return cls

    return register


def _backend_name(backend: Any) -> str:
    name = getattr(backend, "backend_name", backend)
    if not isinstance(name, str):
        raise TypeError(f"backend: expected a name or a config with a backend_name, got {backend!r}")
    return name


def is_communication_backend(backend: Any) -> bool:
    """Whether ``backend``, a name or a config, is registered."""
    name = getattr(backend, "backend_name", backend)
    return isinstance(name, str) and name in _REGISTRY


def available_communication_backends() -> list[str]:
    """Names of the registered backends that can run on this machine."""
    return sorted(name for name, cls in _REGISTRY.items() if cls.is_platform_supported())


def create_communication(
    bootstrap: BootstrapConfig, params: MoEEpCommParams, backend: Any, **options: Any
) -> MoEEpCommunication:
    """Makes the backend named by ``backend``, a registered name or a config object. Collective.

    A config object reaches the backend as ``config``; ``options`` are passed on (the one-sided backends take
    ``namespace``, a string that asks for windows of its own).

    Raises:
        KeyError: no backend of that name; the text lists the registered ones.
        RuntimeError: the backend cannot run here, or a rank could not allocate or map memory.
    """
    name = _backend_name(backend)
    if name not in _REGISTRY:
        raise KeyError(f"unknown communication backend {name!r}; registered: {sorted(_REGISTRY)}")
    if not isinstance(backend, str):
        options["config"] = backend
    return _REGISTRY[name](bootstrap, params, **options)
