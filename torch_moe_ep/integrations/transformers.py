"""Expert parallelism for Mixture-of-Experts models of Hugging Face Transformers, by one call.

In Transformers 5 the block of a MoE layer routes, then calls ``experts(hidden_states, top_k_index, top_k_weights)`` on
one module that holds all experts as fused 3-D parameters. Only that module is replaced: the router, shared experts, the
cache and the rest of the model stay Transformers' own. The weights and layouts of the families are in :data:`FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_moe_ep.bootstrap import BootstrapConfig, TorchDistributedCommBackend, choose_comm_backend
from torch_moe_ep.communication import MoEEpCommunication
from torch_moe_ep.experts import expert_major, grouped_mm, sum_slots, take_rows
from torch_moe_ep.layer import MoEEpLayer, MoEEpTensors, SplitConfig, make_group
from torch_moe_ep.params import MoEEpCommParams
from torch_moe_ep.payload import QuantFormat

SUPPORTED_VERSIONS = (5, 6)
"""Major versions of transformers, first included and last excluded. In version 4 most families have a module per expert
and gpt-oss's experts take dense weights."""

GROWING_CACHES = ("dynamic", "dynamic_full", "offloaded", "quantized")
"""Values of ``cache_implementation`` with which a sequence may have any length; the others hold a fixed number."""

Gate = Callable[[torch.Tensor], torch.Tensor]
"""``[S, 2*F]`` of the first projection to the ``[S, F]`` that enter the second."""


def _gate_first_half(act_fn: Gate, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return act_fn(gate) * up


def _gate_even_columns_clamped(alpha: float, limit: float, gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss: columns gate, up, gate, up, ...; ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped values."""
    gate = gate_up[..., ::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


@dataclass(frozen=True)
class Family:
    """How a family of models stores its experts and what they compute.

    Args:
        experts: class names of the module that holds the experts, in the supported versions.
        transposed: whether a weight is ``[E, in, out]``; False is ``[E, out, in]``.
        biased: whether ``gate_up_proj_bias`` ``[E, 2*F]`` and ``down_proj_bias`` ``[E, H]`` are added.
        gate: makes the :data:`Gate` from Transformers' module.
    """

    experts: tuple[str, ...]
    transposed: bool = False
    biased: bool = False
    gate: Callable[[Any], Gate] = lambda module: partial(_gate_first_half, module.act_fn)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names, in the order in which Transformers' module has them."""
        if self.biased:
            return "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"
        return "gate_up_proj", "down_proj"


FAMILIES = {
    "Mixtral": Family(("MixtralExperts",)),
    "Qwen2-MoE": Family(("Qwen2MoeExperts",)),
    "Qwen3-MoE": Family(("Qwen3MoeExperts",)),
    "DeepSeek-V2": Family(("DeepseekV2Experts",)),
    "DeepSeek-V3": Family(("DeepseekV3Experts", "DeepseekV3NaiveMoe")),
    "GLM-4-MoE": Family(("Glm4MoeExperts", "Glm4MoeNaiveMoe")),
    "OLMoE": Family(("OlmoeExperts",)),
    "gpt-oss": Family(
        ("GptOssExperts",),
        transposed=True,
        biased=True,
        gate=lambda module: partial(_gate_even_columns_clamped, module.alpha, module.limit),
    ),
}
"""The supported families by their names; a new one is a row here and one in tests/transformers_models.py."""

_FAMILY_OF_CLASS = {name: family for family in FAMILIES.values() for name in family.experts}


class ExpertParallelExperts(MoEEpLayer):
    """Stands in the place of Transformers' module of all experts and holds this rank's, under the same names.

    Its parameters are this rank's rows of Transformers' (dimension 0 is the expert). ``load_state_dict`` also takes
    whole ones, and keeps its rows.
    """

    def __init__(
        self, experts: nn.Module, family: Family, group: MoEEpCommunication, state: ExpertParallel, name: str
    ) -> None:
        # The kernel is a method, so that the parameters keep their names and whatever replaces them is seen.
        super().__init__(None, group.params, None, SplitConfig(kernel=self.compute), group=group)
        self.family, self.gate, self.state, self.name = family, family.gate(experts), state, name
        self.local_experts = self.params.local_experts(group.ep_rank, group.ep_size)
        mine = slice(self.local_experts.start, self.local_experts.stop)
        for parameter in family.parameters:
            whole = getattr(experts, parameter)
            # A clone: a view would keep the experts of all ranks in memory.
            local = whole.detach()[mine].clone(memory_format=torch.contiguous_format).to(group.order.device)
            setattr(self, parameter, nn.Parameter(local, requires_grad=whole.requires_grad))
        self.train(experts.training)

    def forward(  # type: ignore[override]  # the interface of the module whose place it takes
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[T, H]`` tokens, ``[T, K]`` global expert ids and their weights to ``[T, H]``. Collective."""
        most, tokens = self.state.tokens_per_rank, hidden_states.shape[0]
        if tokens > most:
            raise ValueError(_too_many_tokens(tokens, most, self.params.max_tokens_per_rank, self.name))
        rows = hidden_states.to(self.params.token_dtype)
        out = super().forward(MoEEpTensors(rows, top_k_index, top_k_weights, runtime_max_tokens_per_rank=most))
        return out.to(hidden_states.dtype)

    def compute(self, rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The kernel: ``[N, H]`` rows through this rank's experts, weighted and summed; see ``GroupedSwiGLU``."""
        if self.num_local_experts == 0:
            # No token comes here, but the backward of combine is a collective: the result depends on what wants
            # gradients.
            nothing = sum(getattr(self, parameter).sum() for parameter in self.family.parameters)
            return torch.where(local_ids[:, :1] >= 0, rows, 0) + nothing
        layout = expert_major(local_ids, self.num_local_experts)
        slots = take_rows(rows, layout)
        gate_up = self._product(slots, "gate_up_proj", layout.offsets)
        out = self._product(self.gate(gate_up), "down_proj", layout.offsets)
        return sum_slots(out, weights, layout)

    compute.skips_empty_rows = True  # type: ignore[attr-defined]

    def _product(self, slots: torch.Tensor, name: str, offsets: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, name)
        out = grouped_mm(slots, weight.transpose(1, 2) if self.family.transposed else weight, offsets)
        if not self.family.biased:
            return out
        numbers = torch.arange(slots.shape[0], dtype=offsets.dtype, device=offsets.device)
        expert = torch.searchsorted(offsets, numbers, right=True)
        bias = getattr(self, f"{name}_bias")[expert.clamp(max=self.num_local_experts - 1)]
        # Slots without a pair are unspecified here, and so are the gradients that come back for them: neither may reach
        # the gradient of the bias of the expert that was put in for them.
        return torch.where((expert < self.num_local_experts).unsqueeze(1), out + bias, 0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for parameter in self.family.parameters:
            given = state_dict.get(prefix + parameter)
            # Where one rank has all experts both forms are the same.
            if given is not None and given.shape[:1] == (self.params.num_experts,):
                state_dict[prefix + parameter] = given[self.local_experts.start : self.local_experts.stop]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"experts {self.local_experts.start}..{self.local_experts.stop - 1} of {self.params.num_experts}"


def _too_many_tokens(tokens: int, most: int, capacity: int, where: str) -> str:
    if most < capacity:
        return (
            f"{where}: expected at most tokens_per_rank = {most} tokens (batch size times sequence length) in this "
            f"step, got {tokens}; set model.expert_parallel.tokens_per_rank to at least that, the same on every rank"
        )
    return (
        f"{where}: expected at most max_tokens_per_rank = {capacity} tokens (batch size times sequence length) in one "
        f"step, got {tokens}; pass a larger expert_parallel(max_tokens_per_rank=...) or feed the prompt in pieces"
    )


class ExpertParallel:
    """The expert parallelism of a model, as ``model.expert_parallel``.

    Attributes:
        bootstrap: the group.
        communicators: those of the model; one serves all layers of equal sizes, which run one after the other.
        max_tokens_per_rank: C.
        agrees: whether every step begins by asking the other ranks for their number of tokens.
    """

    def __init__(self, bootstrap: BootstrapConfig, max_tokens_per_rank: int, agrees: bool, comm_backend: Any) -> None:
        self.bootstrap, self.max_tokens_per_rank, self.agrees = bootstrap, max_tokens_per_rank, agrees
        self.communicators: list[MoEEpCommunication] = []
        self.exchange, _ = choose_comm_backend(bootstrap, comm_backend)
        self._tokens_per_rank = max_tokens_per_rank

    @property
    def tokens_per_rank(self) -> int:
        """R of the next step: at least every rank's number of tokens and equal on all ranks, at most
        ``max_tokens_per_rank``. The layers compute on W*R rows, so that a step of few tokens is cheaper with a small
        one. Compiled code has one graph per value."""
        return self._tokens_per_rank

    @tokens_per_rank.setter
    def tokens_per_rank(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"tokens_per_rank: expected an int, got {value!r}")
        if not 1 <= value <= self.max_tokens_per_rank:
            raise ValueError(
                f"tokens_per_rank: expected 1..{self.max_tokens_per_rank} (max_tokens_per_rank), got {value}"
            )
        self._tokens_per_rank = value

    def agree(self, tokens: int) -> int:
        """Sets ``tokens_per_rank`` to the power of two that holds every rank's ``tokens``, at most the capacity, and
        returns it. Collective; raises ValueError on every rank alike if one has more than the capacity."""
        most = self._largest(tokens)
        if most > self.max_tokens_per_rank:
            raise ValueError(_too_many_tokens(most, self.max_tokens_per_rank, self.max_tokens_per_rank, "a rank"))
        self._tokens_per_rank = min(self.max_tokens_per_rank, 1 << max(0, most - 1).bit_length())
        return self._tokens_per_rank

    def _largest(self, tokens: int) -> int:
        if isinstance(self.exchange, TorchDistributedCommBackend):
            value = torch.tensor([tokens], device=self.communicators[0].order.device)
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.exchange.process_group)
            return int(value.item())
        return max(self.exchange.allgather(tokens))

    def destroy(self) -> None:
        """Frees the windows; the model cannot run any more. Idempotent; call it on every rank."""
        for communicator in self.communicators:
            communicator.destroy()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        return self  # of the communicators there is no second one


def expert_parallel(
    model: Any,
    bootstrap: BootstrapConfig,
    *,
    max_tokens_per_rank: int,
    backend: Any = None,
    tokens_per_rank: int | str | None = None,
    device: torch.device | str | None = None,
    dispatch_format: QuantFormat | None = None,
    namespace: str = "",
) -> Any:
    """Spreads the experts of a Transformers model over the ranks of a group, in place. Collective.

    Every rank passes the same model; afterwards it holds its own experts, as ``local_experts`` of
    :class:`~torch_moe_ep.MoEEpCommParams` splits them, and all of the rest. Each rank runs its own tokens, and all
    ranks run the same number of forward passes: a forward is a collective of every MoE layer. ``generate()`` passes
    ``synced_gpus=True`` unless told otherwise: a rank whose sequences are finished goes on with steps whose results it
    drops until all ranks are done. ``save_pretrained()`` becomes a collective that writes the whole model on rank 0.

    Args:
        model: a ``PreTrainedModel`` with experts of one of :data:`FAMILIES`, unquantized.
        bootstrap: the group.
        max_tokens_per_rank: C, the most tokens (batch size times sequence length, padding included) that a rank feeds
            in one forward: of a prompt, not of one decoding step. Sizes the windows.
        backend: name or config of a communication backend; None is ``nvlink_one_sided`` on CUDA, ``shm_one_sided`` on
            CPU.
        tokens_per_rank: R of every step (see :attr:`ExpertParallel.tokens_per_rank`, by which it can be changed between
            steps); None is ``max_tokens_per_rank``. "agreed" asks the other ranks at the start of every step, one small
            all-reduce and a wait for the device: prompts and decoding steps each get the R they need. It cannot be
            part of a graph; a model compiled with ``fullgraph=True`` sets an int.
        device: where the model is to run: it is moved there after the other ranks' experts are gone, so that a GPU need
            not hold them at any time. None is where its experts are.
        dispatch_format: the :class:`~torch_moe_ep.QuantFormat` in which tokens travel to the experts, which get them
            back in their own dtype; None sends them as they are. One without a global scale. A backend given as a
            config needs ``extra_payload_bytes_per_token`` for training, as :class:`~torch_moe_ep.MoEEpLayer` says.
        namespace: other than "", asks for windows that no other communicator shares; needed by models that run at once.

    Returns:
        ``model``, with an :class:`ExpertParallel` as ``model.expert_parallel``.

    Raises:
        TypeError: the model is not a ``PreTrainedModel``.
        ValueError: an argument does not fit; the model has no experts or experts of an unknown kind: the text names
            those that are supported.
        ImportError: transformers is missing, or not in the supported range.
    """
    _check_model(model)
    layers = _find_experts(model)
    if isinstance(tokens_per_rank, str) and tokens_per_rank != "agreed":
        raise ValueError(f"tokens_per_rank: expected an int, None or 'agreed', got {tokens_per_rank!r}")
    if device is None:
        device = next(iter(layers.values()))[0].down_proj.device
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError("device: the model has no memory (device meta); expected the device where it is to run")
    if dispatch_format is QuantFormat.FP8PerTensor:
        raise ValueError("dispatch_format: expected a format without a global scale, got FP8PerTensor")
    sizes = {name: _sizes(model, name, *layer, max_tokens_per_rank, dispatch_format) for name, layer in layers.items()}

    state = ExpertParallel(
        bootstrap, max_tokens_per_rank, tokens_per_rank == "agreed", getattr(backend, "comm_backend", None)
    )
    if isinstance(tokens_per_rank, int):
        state.tokens_per_rank = tokens_per_rank
    options = {"namespace": namespace} if namespace else {}
    groups: dict[MoEEpCommParams, MoEEpCommunication] = {}
    try:
        for params in sizes.values():
            if params not in groups:
                groups[params] = make_group(bootstrap, params, backend, device, **options)
    finally:  # so that whoever catches an error of the second finds nothing left of the first
        state.communicators = list(groups.values())
        if len(groups) < len(set(sizes.values())):
            state.destroy()

    for name, (experts, family) in layers.items():
        model.set_submodule(name, ExpertParallelExperts(experts, family, groups[sizes[name]], state, name))
    layers.clear()
    model.to(state.communicators[0].order.device)
    model.expert_parallel = state
    model.generate = MethodType(_generate, model)
    model.save_pretrained = MethodType(_save_pretrained, model)
    if state.agrees:
        # The base model, so that a call of it alone asks as well.
        model.base_model.register_forward_pre_hook(partial(_agree_before_forward, state), with_kwargs=True)
    return model


def gather_state_dict(model: Any) -> dict[str, torch.Tensor]:
    """The state dict of the whole model, with the experts of all ranks, on rank 0; empty on other ranks. Collective.

    The experts of other ranks arrive on the CPU.
    """
    state: ExpertParallel = model.expert_parallel
    whole = model.state_dict() if state.bootstrap.rank == 0 else {}
    for name, module in model.named_modules():
        if isinstance(module, ExpertParallelExperts):
            for parameter in module.family.parameters:
                parts = state.exchange.allgather(getattr(module, parameter).detach().cpu())
                if whole:
                    whole[f"{name}.{parameter}"] = torch.cat(parts)
    return whole


def _check_model(model: Any) -> None:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("expert_parallel needs transformers: pip install 'torch-moe-ep[transformers]'") from error
    first, last = SUPPORTED_VERSIONS
    if not first <= int(transformers.__version__.split(".")[0]) < last:
        raise ImportError(f"expert_parallel: expected transformers>={first},<{last}, found {transformers.__version__}")
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model: expected a transformers.PreTrainedModel, got {type(model).__name__}")
    if hasattr(model, "expert_parallel"):
        raise ValueError("model: it is expert-parallel already; expected one that has not been converted")


def _find_experts(model: nn.Module) -> dict[str, tuple[Any, Family]]:
    """The modules to replace, by name. Raises ValueError if there are none, or other experts too."""
    known, unknown = {}, set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _FAMILY_OF_CLASS:
            known[name] = (module, _FAMILY_OF_CLASS[kind])
        elif kind.endswith(("Experts", "NaiveMoe")) or isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            unknown.add(kind)
    if unknown or not known:
        found = f"experts of class {', '.join(sorted(unknown))}" if unknown else "no experts"
        raise ValueError(
            f"model: {type(model).__name__} has {found}; expected those of {', '.join(FAMILIES)} "
            f"(classes {', '.join(_FAMILY_OF_CLASS)}), unquantized"
        )
    return known


def _sizes(
    model: Any, name: str, experts: Any, family: Family, max_tokens_per_rank: int, dispatch_format: QuantFormat | None
) -> MoEEpCommParams:
    config = model.config.get_text_config()
    count, hidden = experts.gate_up_proj.shape[0], config.hidden_size
    down, gate_up = experts.down_proj.shape, experts.gate_up_proj.shape
    inner = down[1] if family.transposed else down[2]
    expected = ((count, hidden, 2 * inner), (count, inner, hidden)) if family.transposed else (
        (count, 2 * inner, hidden), (count, hidden, inner))
    if (tuple(gate_up), tuple(down)) != expected:
        raise ValueError(
            f"model: {name}: expected gate_up_proj and down_proj of shapes {expected[0]} and {expected[1]}, got "
            f"{tuple(gate_up)} and {tuple(down)}"
        )
    return MoEEpCommParams(
        count, config.num_experts_per_tok, max_tokens_per_rank, hidden, experts.down_proj.dtype, dispatch_format
    )


# Dynamo must not trace it: the number is agreed anew in every step.
@torch.compiler.disable(reason="tokens_per_rank='agreed' asks the other ranks; set an int to compile one graph")
def _agree_before_forward(state: ExpertParallel, module: nn.Module, args: Any, kwargs: Any) -> None:
    given = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
    tokens = next((value for value in given if value is not None), None)
    if tokens is None:
        raise ValueError(f"{type(module).__name__}: expected input_ids or inputs_embeds, from which "
                         "tokens_per_rank='agreed' takes this rank's number of tokens")
    state.agree(tokens.shape[0] * tokens.shape[1])


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate()`` of the model's class, with ``synced_gpus=True`` unless it is given."""
    state: ExpertParallel = self.expert_parallel
    if state.bootstrap.world_size > 1:
        if kwargs.get("synced_gpus") is None:
            if not dist.is_available() or not dist.is_initialized():
                raise RuntimeError(
                    "generate: Transformers keeps ranks in step (synced_gpus) over torch.distributed, which is not "
                    "initialised; call init_process_group first, or pass synced_gpus=False if all ranks take the same "
                    "number of steps"
                )
            kwargs["synced_gpus"] = True
        _check_steps(state, kwargs, kwargs.get("generation_config") or self.generation_config)
    return type(self).generate(self, *args, **kwargs)


def _check_steps(state: ExpertParallel, kwargs: dict[str, Any], config: Any) -> None:
    """Raises ValueError on every rank alike for options with which the ranks would fall out of step."""

    def option(name: str) -> Any:
        return kwargs.get(name, getattr(config, name, None))

    given = [kwargs.get(name) for name in ("past_key_values", "cache")]
    kind = option("cache_implementation")
    grows = kind in (None, *GROWING_CACHES) and not any(getattr(cache, "is_compileable", False) for cache in given)
    mine = (kind, grows, option("max_new_tokens"), option("prefill_chunk_size"), option("use_cache"))
    kinds, growing, steps, chunks, caches = map(list, zip(*state.exchange.allgather(mine), strict=True))
    if "paged" in kinds:
        raise ValueError(
            "cache_implementation: expected none of continuous batching, which does not keep ranks in step, got "
            f"{kinds}"
        )
    if chunks != [None] * len(chunks):
        raise ValueError(
            "prefill_chunk_size: expected None on every rank, since prompts of different lengths would give the ranks "
            f"different numbers of forward passes, got {chunks}"
        )
    if False in caches:
        raise ValueError(
            "use_cache: expected True on every rank, since several versions of transformers fail in the steps of a "
            f"finished rank that has no cache, got {caches}"
        )
    if not all(growing) and (None in steps or len(set(steps)) > 1):
        raise ValueError(
            "max_new_tokens: expected the same int on every rank where the cache is static, since a rank that is "
            f"finished goes on into the rest of its cache, got {steps}"
        )


def _save_pretrained(self: Any, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> None:
    """``save_pretrained()`` of the model's class, of the whole model. Collective; rank 0 writes."""
    state: ExpertParallel = self.expert_parallel
    whole = gather_state_dict(self) if state_dict is None else state_dict
    try:
        if state.bootstrap.rank == 0:
            type(self).save_pretrained(self, save_directory, *args, state_dict=whole, **kwargs)
    finally:
        state.exchange.barrier()
