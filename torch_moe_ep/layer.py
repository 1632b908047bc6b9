"""A Mixture-of-Experts layer over an expert-parallel group: dispatch, this rank's experts and combine in one module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from torch_moe_ep import functional
from torch_moe_ep.alternation import AlternatingAlltoAll
from torch_moe_ep.bootstrap import BootstrapConfig
from torch_moe_ep.communication import MoEEpCommunication, MoEEpDispatchResult, create_communication
from torch_moe_ep.config import NVLinkOneSidedConfig, ShmOneSidedConfig
from torch_moe_ep.experts import GroupedSwiGLU, IdentityExperts
from torch_moe_ep.params import MoEEpCommParams
from torch_moe_ep.payload import QuantFormat, dequantize, quantize

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows ``[W*R, H]``, local ids ``[W*R, K]`` int32 with -1 = not an expert of this rank, weights ``[W*R, K]``) to
``[W*R, H]``, weighted and summed over the experts of this rank."""


@dataclass
class MoEEpTensors:
    """What one step of the layer takes; the names are those of ``flashinfer.moe_ep.MoEEpTensors``.

    Args:
        hidden_states: ``[T, H]`` tokens of this rank in ``params.dtype``; where ``params.dispatch_format`` is one of
            bytes, also values that :func:`~torch_moe_ep.quantize` has made.
        topk_ids: ``[T, K]`` int32 or int64 global expert ids; ids outside ``[0, E)`` select nothing.
        topk_weights: ``[T, K]`` floating point.
        hidden_states_scale: the scale factors of quantized tokens; None of others.
        runtime_max_tokens_per_rank: R, at least the largest T of the step over all ranks and equal on all of them; None
            is ``params.max_tokens_per_rank``. Fixed in a captured CUDA graph.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    hidden_states_scale: torch.Tensor | None = None
    runtime_max_tokens_per_rank: int | None = None


torch.export.register_dataclass(MoEEpTensors, serialized_type_name="torch_moe_ep.MoEEpTensors")


@dataclass(frozen=True)
class MoEWeightPack:
    """The weights of this rank's experts; the names are those of ``flashinfer.moe_ep.MoEWeightPack``.

    Args:
        w13: ``[L, 2*F, H]``, L = experts of this rank, F = inner size; see ``GroupedSwiGLUConfig.gate_first``.
        w2: ``[L, H, F]``.
        w13_scale, w2_scale: of float8_e4m3fn weights, as :class:`~torch_moe_ep.GroupedSwiGLU` takes them.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class GroupedSwiGLUConfig:
    """The kernel of grouped SwiGLU experts over a :class:`MoEWeightPack`.

    Args:
        gate_first: whether ``w13`` holds the gate before up, as Transformers' ``gate_up_proj`` does; False is up before
            gate, the order of FlashInfer.
    """

    gate_first: bool = False


@dataclass(frozen=True)
class SplitConfig:
    """How a layer communicates and computes; the names are those of ``flashinfer.moe_ep.SplitConfig``.

    Args:
        comm: name or config of a communication backend, obeyed or refused with the reason; None is nvlink_one_sided on
            CUDA and shm_one_sided on CPU.
        kernel: a :data:`Kernel`; "identity"; or a :class:`GroupedSwiGLUConfig`. None is the latter's defaults.
    """

    comm: Any = None
    kernel: Any = None


class MoEEpLayer(nn.Module):
    """Dispatch, experts and combine; compiles as one graph.

    With ``params.dispatch_format`` tokens are quantized before they are sent and dequantized where they arrive; the
    gradient of a token passes as if it had not been rounded. Gradients themselves travel unquantized: a config or
    communicator of your own needs ``extra_payload_bytes_per_token`` for what an unquantized row is longer than a
    quantized one, or backward raises.

    Args:
        bootstrap: the group; not needed with ``group``.
        params: sizes of the layer; None with ``group`` is those of the group.
        weights: of this rank's experts, for the SwiGLU kernel; None for a kernel that has its own.
        backend: a :class:`SplitConfig`; a name or config of a communication backend stands for ``SplitConfig(comm=)``.
        group: a communicator to use instead of making one. Layers that run one after the other share one, and with it
            its windows; whoever made it destroys it.
        global_scale: a float32 scalar, equal on all ranks: that of :func:`~torch_moe_ep.quantize`, for the formats that
            have one. A buffer, so that it is saved with the layer and can be written to.
        device: where the layer runs; None is the device of the weights or of the kernel's parameters, else the default.
        shared_experts: a module ``[T, H]`` to ``[T, H]`` over the unquantized tokens; its result is added to the
            layer's.
        overlap: when the shared experts run: "dispatch" between the start and the wait of the dispatch, "combine"
            between those of the combine, None before both, which are one op each then. The same on every rank.

    Raises:
        ValueError, TypeError: an argument does not fit; names it.
        KeyError: no backend of that name.
        RuntimeError: the backend cannot run here; says why.
    """

    order: torch.Tensor
    first_expert: torch.Tensor
    global_scale: torch.Tensor | None

    def __init__(
        self,
        bootstrap: BootstrapConfig | None = None,
        params: MoEEpCommParams | None = None,
        weights: MoEWeightPack | None = None,
        backend: Any = None,
        *,
        group: MoEEpCommunication | None = None,
        global_scale: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        shared_experts: nn.Module | None = None,
        overlap: str | None = "dispatch",
    ) -> None:
        super().__init__()
        if overlap not in ("dispatch", "combine", None):
            raise ValueError(f"overlap: expected 'dispatch', 'combine' or None, got {overlap!r}")
        if backend is None:
            backend = SplitConfig()
        elif not isinstance(backend, SplitConfig):
            backend = SplitConfig(comm=backend)
        kernel = make_kernel(backend.kernel, weights)
        params = params or (group.params if group is not None else None)
        if params is None or group is None and bootstrap is None:
            raise ValueError("bootstrap, params: expected both, or a communicator as group=")
        _check_global_scale(global_scale, params.dispatch_format)
        where = group.order.device if group is not None else _device(device, kernel)
        self._owns_group = group is None
        if group is None:
            assert bootstrap is not None
            local = params.local_experts(bootstrap.rank, bootstrap.world_size)
            _check_kernel(kernel, params, len(local))
            group = make_group(bootstrap, params, backend.comm, where)
        else:
            _check_group(group, backend.comm, device)
            local = params.local_experts(group.ep_rank, group.ep_size)
            _check_kernel(kernel, params, len(local))
        self.kernel, self.group, self.params = kernel, group, params
        self.shared_experts = shared_experts
        self.overlap = overlap if shared_experts is not None else None
        self.comm, self.ep_size, self.timeout_sec = group.comm, group.ep_size, group.timeout_sec
        self._first_expert, self.num_local_experts = local.start, len(local)
        self.register_buffer("order", None, persistent=False)
        self.register_buffer("first_expert", None, persistent=False)
        self.register_buffer("global_scale", global_scale)
        self._set_buffers()

    def forward(self, tensors: MoEEpTensors) -> torch.Tensor:
        """``[T, H]``: each token's weighted sum over its experts; zeros for a token that selects none. Collective."""
        quantized = self._check(tensors)
        if not isinstance(self.group, AlternatingAlltoAll):
            return self._through_the_class(tensors, quantized)
        x, r = tensors.hidden_states, tensors.runtime_max_tokens_per_rank
        weights: Any = tensors.topk_weights
        shared = self._shared(x) if self.overlap is None else None
        if self.params.dispatch_format is None:
            values, scale, sent_weights = x, None, weights
        else:
            values, scale = self._quantize(tensors, quantized)
            sent_weights = weights.detach()
        if self.overlap == "dispatch":
            pending = functional.dispatch_start(
                self, values, tensors.topk_ids, sent_weights, hidden_states_scale=scale, tokens_per_rank=r
            )
            shared = self._shared(x)
            got = functional.dispatch_wait(pending, shared)
        else:
            got = functional.dispatch(
                self, values, tensors.topk_ids, sent_weights, hidden_states_scale=scale, tokens_per_rank=r
            )
        if self.params.dispatch_format is None:
            rows, weights = got.hidden_states, got.topk_weights
        else:
            rows = self._dequantize(got)
            if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
                options = functional._Options(self.comm, self.ep_size, self.timeout_sec)
                rows, weights = _AsIfDispatched.apply(
                    x, weights, rows, got.topk_weights, got.routing, self.order, options
                )
            else:
                weights = got.topk_weights
        partials = self._experts(rows, got.topk_ids, weights)
        if self.overlap == "combine":
            combining = functional.combine_start(self, partials, got.routing, num_tokens=x.shape[0])
            shared = self._shared(x)
            out = functional.combine_wait(combining, shared)
        else:
            out = functional.combine(self, partials, got.routing, num_tokens=x.shape[0])
        return out if shared is None else out + shared

    def _shared(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.shared_experts is None:
            return None
        out = self.shared_experts(x)
        if out.shape != x.shape:
            raise ValueError(f"shared_experts: expected a result of shape {tuple(x.shape)}, got {tuple(out.shape)}")
        return out

    def _through_the_class(self, tensors: MoEEpTensors, quantized: bool) -> torch.Tensor:
        """A step with a backend that has nothing but its class."""
        x, scale = tensors.hidden_states, tensors.hidden_states_scale
        if self.params.dispatch_format is not None:
            if not quantized and x.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"MoEEpLayer: with {self.group.backend_name} a quantized dispatch has no gradient; expected "
                    "torch.no_grad() or params.dispatch_format None"
                )
            x, scale = self._quantize(tensors, quantized)
        received = self.group.dispatch(
            x, tensors.topk_ids, tensors.topk_weights, hidden_states_scale=scale,
            runtime_max_tokens_per_rank=tensors.runtime_max_tokens_per_rank,
        )
        rows = received.hidden_states if self.params.dispatch_format is None else self._dequantize(received)
        shared = self._shared(tensors.hidden_states)
        out = self.group.combine(self._experts(rows, received.topk_ids, received.topk_weights))
        return out if shared is None else out + shared

    def _quantize(self, tensors: MoEEpTensors, quantized: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, quant_format = tensors.hidden_states, self.params.dispatch_format
        if quantized or quant_format is None:
            return x, tensors.hidden_states_scale
        return quantize(x, quant_format, global_scale=self.global_scale)

    def _dequantize(self, received: functional.Dispatched | MoEEpDispatchResult) -> torch.Tensor:
        params = self.params
        assert params.dispatch_format is not None
        return dequantize(
            received.hidden_states, received.hidden_states_scale, params.dispatch_format, params.hidden_size,
            params.token_dtype, global_scale=self.global_scale,
        )

    def _check(self, tensors: MoEEpTensors) -> bool:
        """Whether the tokens are quantized already. Raises if they do not fit."""
        x, scale, params = tensors.hidden_states, tensors.hidden_states_scale, self.params
        if tensors.topk_weights is None:
            raise TypeError("MoEEpTensors.topk_weights: expected a tensor [T, K], got None; pass ones for a plain sum")
        if scale is not None and params.dispatch_format is None:
            raise ValueError("MoEEpTensors.hidden_states_scale: expected None, since params.dispatch_format is None")
        if params.dispatch_format is not None and (scale is not None or x.dtype.itemsize == 1):
            for name, tensor, expected in zip(
                ("hidden_states", "hidden_states_scale"), (x, scale), params.dispatch_row, strict=True
            ):
                given = 0 if tensor is None else tensor[0:0].flatten(1).shape[1] * tensor.dtype.itemsize
                if given != expected:
                    raise ValueError(
                        f"MoEEpTensors.{name}: expected rows of {expected} bytes for {params.dispatch_format.name} "
                        f"and hidden size {params.hidden_size}, got {given}"
                    )
            if self.shared_experts is not None:
                raise ValueError("MoEEpTensors.hidden_states: expected unquantized tokens, for the shared_experts "
                                 f"take them, got {x.dtype}")
            return True
        if x.shape[1:] != (params.hidden_size,):
            raise ValueError(f"MoEEpTensors.hidden_states: expected [T, {params.hidden_size}], got {tuple(x.shape)}")
        if x.dtype != params.token_dtype:
            raise ValueError(f"MoEEpTensors.hidden_states: expected {params.token_dtype}, params.dtype, got {x.dtype}")
        return False

    def _experts(self, rows: torch.Tensor, ids: torch.Tensor, weights: Any) -> torch.Tensor:
        local = ids - self.first_expert
        here = (local >= 0) & (local < self.num_local_experts)
        local = torch.where(here, local, -1)
        weights = torch.where(here, weights, 0)
        if not getattr(self.kernel, "skips_empty_rows", False):
            rows = torch.where(here.any(1, keepdim=True), rows, 0)
        return self.kernel(rows, local, weights)

    def destroy(self) -> None:
        """Releases the communicator if the layer made it. Idempotent; call it on every rank."""
        if self._owns_group:
            self.group.destroy()

    def _set_buffers(self) -> None:
        # One `order` tensor orders all layers of a communicator: no copy or conversion of the module may part them.
        self.order = self.group.order
        # A tensor, so that all ranks compile the same code.
        self.first_expert = torch.tensor([self._first_expert], dtype=torch.int32, device=self.order.device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> MoEEpLayer:
        super()._apply(fn, recurse)
        self._set_buffers()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_buffers()


class _AsIfDispatched(torch.autograd.Function):
    """The rows and weights that a quantized dispatch gave; their gradients go home to ``x`` and its weights."""

    @staticmethod
    def forward(ctx, x, topk_weights, rows, weights, routing, order, options):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(routing, order)
        ctx.num_tokens, ctx.options = x.shape[0], options
        return rows.clone(), weights.clone()  # a result that is an argument would be one tensor of two histories

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, grad_weights):  # type: ignore[no-untyped-def]
        routing, order = ctx.saved_tensors
        grad_x = grad_topk_weights = None
        home = lambda grad: functional._combine(  # noqa: E731
            functional._Combining(grad, routing, order, ctx.num_tokens, None, ctx.options)
        )
        if ctx.needs_input_grad[0]:
            grad_x = home(grad_rows)
        if ctx.needs_input_grad[1]:
            grad_topk_weights = home(grad_weights)
        return grad_x, grad_topk_weights, None, None, None, None, None


def make_kernel(kernel: Any, weights: MoEWeightPack | None) -> Kernel:
    """The :data:`Kernel` that ``SplitConfig.kernel`` names."""
    if kernel is None:
        kernel = GroupedSwiGLUConfig()
    if isinstance(kernel, GroupedSwiGLUConfig):
        if weights is None:
            raise ValueError("weights: expected a MoEWeightPack for the SwiGLU kernel, got None; or pass a kernel that "
                             "has its own weights as SplitConfig(kernel=...)")
        return GroupedSwiGLU(
            weights.w13, weights.w2, weights.w13_scale, weights.w2_scale, gate_first=kernel.gate_first
        )
    if weights is not None:
        raise ValueError(f"weights: expected None, since the kernel {kernel!r} takes none")
    if kernel == "identity":
        return IdentityExperts()
    if not callable(kernel):
        raise TypeError(
            f"SplitConfig.kernel: expected None, 'identity', a GroupedSwiGLUConfig or a callable, got {kernel!r}"
        )
    return kernel


def _device(given: torch.device | str | None, kernel: Any) -> torch.device:
    if given is not None:
        return torch.device(given)
    tensors = list(kernel.parameters()) if isinstance(kernel, nn.Module) else []
    return tensors[0].device if tensors else torch.get_default_device()


def _check_global_scale(scale: torch.Tensor | None, quant_format: QuantFormat | None) -> None:
    if quant_format is not QuantFormat.NVFP4 and (scale is not None) != (quant_format is QuantFormat.FP8PerTensor):
        raise ValueError(
            f"global_scale: expected {'None' if scale is not None else 'a float32 scalar'} for "
            f"params.dispatch_format {quant_format and quant_format.name}"
        )


def _check_kernel(kernel: Kernel, params: MoEEpCommParams, num_local_experts: int) -> None:
    if not isinstance(kernel, GroupedSwiGLU):
        return
    for name, weight, axis in (("w13", kernel.w13, 2), ("w2", kernel.w2, 1)):
        if (weight.shape[0], weight.shape[axis]) != (num_local_experts, params.hidden_size):
            raise ValueError(
                f"weights.{name}: expected {num_local_experts} local experts and hidden size {params.hidden_size} in "
                f"{'[L, 2*F, H]' if axis == 2 else '[L, H, F]'}, got shape {tuple(weight.shape)}"
            )


def _check_group(group: MoEEpCommunication, comm: Any, device: torch.device | str | None) -> None:
    name = getattr(comm, "backend_name", comm)
    if name is not None and name != group.backend_name:
        raise ValueError(f"SplitConfig.comm: expected None or {group.backend_name!r}, that of group=, got {comm!r}")
    if device is not None and torch.device(device).type != group.order.device.type:
        raise ValueError(f"device: expected None or {group.order.device}, that of group=, got {device}")


def make_group(
    bootstrap: BootstrapConfig, params: MoEEpCommParams, comm: Any, device: torch.device, **options: Any
) -> MoEEpCommunication:
    """A communicator for layers on ``device``, by what ``SplitConfig.comm`` says; ``options`` as for
    :func:`~torch_moe_ep.create_communication`. Collective."""
    if comm is None:
        comm = "nvlink_one_sided" if device.type == "cuda" else "shm_one_sided"
    configs = {"nvlink_one_sided": NVLinkOneSidedConfig, "shm_one_sided": ShmOneSidedConfig}
    if params.dispatch_format is not None and isinstance(comm, str) and comm in configs:
        # The gradients that come back to the experts travel like tokens, unquantized.
        unquantized = params.hidden_size * params.token_dtype.itemsize
        comm = configs[comm](extra_payload_bytes_per_token=max(0, unquantized - params.dispatch_bytes_per_token))
    group = create_communication(bootstrap, params, comm, **options)
    if group.order.device.type != device.type:
        group.destroy()
        raise ValueError(
            f"SplitConfig.comm: {group.backend_name} moves tensors on {group.order.device.type}, but the layer is on "
            f"{device}; pass another backend, or weights on the backend's device"
        )
    return group
