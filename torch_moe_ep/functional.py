"""The ops as plain functions: they pass the communicator's name, sizes and order tensor for you, and differentiate."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.autograd.function import once_differentiable

from torch_moe_ep import collectives
from torch_moe_ep.params import MoEEpCommParams

MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)


class Group(Protocol):
    """What the functions need of a communicator; every :class:`~torch_moe_ep.MoEEpCommunication` has it."""

    comm: str
    order: torch.Tensor
    ep_size: int
    params: MoEEpCommParams
    timeout_sec: int


class Dispatched(NamedTuple):
    """What :func:`dispatch` returns; fields that were not sent are None. Rows as in the row contract of the README."""

    hidden_states: torch.Tensor  # [W*R, *]
    topk_ids: torch.Tensor  # [W*R, K] int32
    topk_weights: torch.Tensor | None  # [W*R, K]
    hidden_states_scale: torch.Tensor | None  # [W*R, *]
    eplb_gathered_stats: torch.Tensor | None  # [W, n] int32
    routing: torch.Tensor  # opaque; pass it to combine


def dispatch(
    group: Group,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    hidden_states_scale: torch.Tensor | None = None,
    tokens_per_rank: int | None = None,
    eplb_local_stats: torch.Tensor | None = None,
    active_rank_mask: torch.Tensor | None = None,
) -> Dispatched:
    """Sends each token to every rank that owns one of its experts. Collective; any sequence of ops is legal.

    Args:
        group: the communicator.
        hidden_states: ``[T, *]`` rows, of any dtype and strides.
        topk_ids: ``[T, K]`` int32 or int64 global expert ids, K in 1..32; ids outside ``[0, E)`` select nothing.
        topk_weights: ``[T, K]`` floating point, or None. The same choice on every rank.
        hidden_states_scale: ``[T, *]`` of any dtype, or None. The same choice on every rank.
        tokens_per_rank: R, at least every rank's T, equal on all ranks; None is ``params.max_tokens_per_rank``.
        eplb_local_stats: ``[n]`` int32 to all-gather, or None. The same choice on every rank.
        active_rank_mask: CPU uint64 ``[ceil(W/64)]``, bit r of word r/64 = rank r takes part; None = all of them.

    Returns:
        Token t of rank s in row ``s*R + t``. Gradients flow to hidden_states and topk_weights.

    Raises:
        ValueError, TypeError: an argument does not fit; names it; nothing was sent.
        RuntimeError: the ranks disagree about the step, or a wait outlived timeout_sec.
    """
    return _differentiable_dispatch(
        _dispatching(group, hidden_states, topk_ids, topk_weights, hidden_states_scale, tokens_per_rank,
                     eplb_local_stats, active_rank_mask),
        None,
    )


def dispatch_start(
    group: Group,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    hidden_states_scale: torch.Tensor | None = None,
    tokens_per_rank: int | None = None,
    eplb_local_stats: torch.Tensor | None = None,
    active_rank_mask: torch.Tensor | None = None,
) -> PendingDispatch:
    """The first half of :func:`dispatch`: sends. What is computed until :func:`dispatch_wait` needs no peer.

    Arguments are those of :func:`dispatch`; leave the tensors unmodified until the wait. On every rank the step is two
    ops or one. No other op of this communicator may come before the wait.

    Raises:
        ValueError, TypeError: an argument does not fit, or a start has not had its wait; nothing was sent. (On a GPU
            the latter is a RuntimeError of the next call.)
        RuntimeError: a wait for peers' earlier rounds outlived timeout_sec.
    """
    args = _dispatching(group, hidden_states, topk_ids, topk_weights, hidden_states_scale, tokens_per_rank,
                        eplb_local_stats, active_rank_mask)
    return PendingDispatch(_start_dispatch(args), args)


def dispatch_wait(pending: PendingDispatch, after: torch.Tensor | None = None) -> Dispatched:
    """The second half of :func:`dispatch`: awaits the peers and takes the rows. timeout_sec begins here.

    Args:
        pending: what :func:`dispatch_start` returned.
        after: what was computed meanwhile. Not read; a compiler is free to move what nothing ties to this place, as
            Inductor does, and computes this before the wait. (Over torch_distributed the wait is the whole op, and this
            goes unused.)

    Returns:
        What :func:`dispatch` returns; gradients flow alike, their backward is a one-phase :func:`combine`.

    Raises:
        ValueError: nothing, or something else, was started. (On a GPU a RuntimeError of the next call.)
        RuntimeError: the ranks disagree about the step, or a wait outlived timeout_sec.
    """
    if not isinstance(pending, PendingDispatch):
        raise TypeError(f"dispatch_wait: pending: expected what dispatch_start returned, got {type(pending).__name__}")
    return _differentiable_dispatch(pending.args, _Waiting(pending.token, _detached(after)))


def combine(
    group: Group,
    expert_output: torch.Tensor,
    routing: torch.Tensor,
    *,
    num_tokens: int,
    active_rank_mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums each token's partial outputs on its source rank. Collective.

    The sum is taken in float32 (float64 for float64 rows), in the order in which the target ranks first appear in the
    token's top-k, and rounded once. A token that went nowhere gives zeros.

    Args:
        group: the communicator of the dispatch.
        expert_output: ``[W*R, H]`` or ``[W, R, H]`` bfloat16, float16, float32 or float64; row i answers received row
            i, weighted and reduced over the local experts. Rows that hold no token are not read.
        routing: that of the dispatch.
        num_tokens: T of the dispatch on this rank.
        active_rank_mask: as passed to the dispatch.
        out: ``[T, H]`` to write into; not differentiable.

    Returns:
        ``[T, H]`` of expert_output's dtype (``out`` if given).
    """
    args = _combining(group, expert_output, routing, num_tokens, active_rank_mask)
    if out is None:
        return _differentiable_combine(args, None)
    if torch.is_grad_enabled() and (expert_output.requires_grad or out.requires_grad):
        raise ValueError("combine: out: a result written into a tensor is not differentiable; expected inputs that "
                         "do not require grad, or torch.no_grad()")
    through = collectives.find_collective(group.comm)
    if through is not None:
        collectives.combine_out(
            through, args.expert_output, routing, args.active_rank_mask, out, num_tokens=num_tokens,
            ep_size=group.ep_size,
        )
    else:
        _combine_op(torch.ops.moe_ep.combine_out, args, out=out)
    return out


def combine_start(
    group: Group,
    expert_output: torch.Tensor,
    routing: torch.Tensor,
    *,
    num_tokens: int,
    active_rank_mask: torch.Tensor | None = None,
) -> PendingCombine:
    """The first half of :func:`combine`: puts the partial outputs at their tokens' ranks. Arguments as there; leave the
    tensors unmodified until :func:`combine_wait`. Rules and errors are those of :func:`dispatch_start`."""
    args = _combining(group, expert_output, routing, num_tokens, active_rank_mask)
    return PendingCombine(_start_combine(args), args)


def combine_wait(pending: PendingCombine, after: torch.Tensor | None = None) -> torch.Tensor:
    """The second half of :func:`combine`: awaits the peers and sums. Returns what :func:`combine` returns; its backward
    is a one-phase :func:`dispatch`. Errors are those of :func:`dispatch_wait`.

    Args:
        pending: what :func:`combine_start` returned.
        after: as for :func:`dispatch_wait`.
    """
    if not isinstance(pending, PendingCombine):
        raise TypeError(f"combine_wait: pending: expected what combine_start returned, got {type(pending).__name__}")
    return _differentiable_combine(pending.args, _Waiting(pending.token, _detached(after)))


def _traceable(active_rank_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Beside CUDA tensors a traced op takes a CPU tensor without dimensions only, which the mask of up to 64 ranks can
    be. (Of more ranks: ``set_active_ranks``.)"""
    if active_rank_mask is None or not torch.compiler.is_compiling() or active_rank_mask.shape != (1,):
        return active_rank_mask
    return active_rank_mask.squeeze(0)


class _Options(NamedTuple):
    comm: str
    ep_size: int
    timeout_sec: int
    tokens_per_rank: int = 0
    num_experts: int = 0
    invalid_expert_id: int = -1


class _Dispatching(NamedTuple):
    """The arguments of a dispatch."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    hidden_states_scale: torch.Tensor | None
    order: torch.Tensor
    eplb_local_stats: torch.Tensor | None
    active_rank_mask: torch.Tensor | None
    options: _Options


class _Combining(NamedTuple):
    """The arguments of a combine."""

    expert_output: torch.Tensor
    routing: torch.Tensor
    order: torch.Tensor
    num_tokens: int
    active_rank_mask: torch.Tensor | None
    options: _Options


def _dispatching(
    group: Group,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    hidden_states_scale: torch.Tensor | None,
    tokens_per_rank: int | None,
    eplb_local_stats: torch.Tensor | None,
    active_rank_mask: torch.Tensor | None,
) -> _Dispatching:
    params = group.params
    r = params.max_tokens_per_rank if tokens_per_rank is None else tokens_per_rank
    options = _Options(group.comm, group.ep_size, group.timeout_sec, r, params.num_experts, params.invalid_expert_id)
    return _Dispatching(hidden_states, topk_ids, topk_weights, hidden_states_scale, group.order, eplb_local_stats,
                        _traceable(active_rank_mask), options)


def _combining(
    group: Group,
    expert_output: torch.Tensor,
    routing: torch.Tensor,
    num_tokens: int,
    active_rank_mask: torch.Tensor | None,
) -> _Combining:
    expert_output = expert_output.flatten(0, 1) if expert_output.dim() == 3 else expert_output
    options = _Options(group.comm, group.ep_size, group.timeout_sec)
    return _Combining(expert_output, routing, group.order, num_tokens, _traceable(active_rank_mask), options)


class PendingDispatch(NamedTuple):
    """A dispatch that :func:`dispatch_start` has begun; :func:`dispatch_wait` takes it. A pytree of its tensors."""

    token: torch.Tensor  # opaque
    args: _Dispatching


class PendingCombine(NamedTuple):
    """A combine that :func:`combine_start` has begun; :func:`combine_wait` takes it. A pytree of its tensors."""

    token: torch.Tensor  # opaque
    args: _Combining


class _Waiting(NamedTuple):
    """What a wait takes beside the arguments of its start."""

    token: torch.Tensor
    after: torch.Tensor | None


def _detached(tensor: MaybeTensor) -> MaybeTensor:
    return tensor.detach() if tensor is not None and tensor.requires_grad else tensor


def _left_to_wait(order: torch.Tensor) -> torch.Tensor:
    """The token of a start over collectives. It sends nothing and the wait is the whole op: nothing keeps a collective
    that has begun in one order with others on all ranks, when their graphs differ."""
    return order.new_zeros(1, dtype=torch.int64)


def _start_dispatch(args: _Dispatching) -> torch.Tensor:
    if collectives.find_collective(args.options.comm) is not None:
        return _left_to_wait(args.order)
    detached = args._replace(
        hidden_states=_detached(args.hidden_states), topk_weights=_detached(args.topk_weights),
        hidden_states_scale=_detached(args.hidden_states_scale),
    )
    return _dispatch_op(torch.ops.moe_ep.dispatch_start, detached)


def _start_combine(args: _Combining) -> torch.Tensor:
    if collectives.find_collective(args.options.comm) is not None:
        return _left_to_wait(args.order)
    return _combine_op(torch.ops.moe_ep.combine_start, args._replace(expert_output=_detached(args.expert_output)))


def _differentiable_dispatch(args: _Dispatching, waiting: _Waiting | None) -> Dispatched:
    """``waiting``: for a start; None dispatches in one op."""
    weights = args.topk_weights
    if torch.is_grad_enabled() and (args.hidden_states.requires_grad or weights is not None and weights.requires_grad):
        out = _Dispatch.apply(*args, *(waiting or (None, None)))
    else:
        out = _dispatch(args, waiting)
    hidden, ids, weights, scale, stats, routing = out
    return Dispatched(
        hidden,
        ids,
        None if args.topk_weights is None else weights,
        None if args.hidden_states_scale is None else scale,
        None if args.eplb_local_stats is None else stats,
        routing,
    )


def _differentiable_combine(args: _Combining, waiting: _Waiting | None) -> torch.Tensor:
    """``waiting``: for a start; None combines in one op."""
    if torch.is_grad_enabled() and args.expert_output.requires_grad:
        return _Combine.apply(*args, *(waiting or (None, None)))
    return _combine(args, waiting)


def _dispatch_op(op: Any, args: _Dispatching, *more: torch.Tensor | None) -> Any:
    """``more``: what a wait takes before the order."""
    options = args.options
    return op(
        *args[:4],
        *more,
        args.order,
        tokens_per_rank=options.tokens_per_rank,
        num_experts=options.num_experts,
        ep_size=options.ep_size,
        invalid_expert_id=options.invalid_expert_id,
        eplb_local_stats=args.eplb_local_stats,
        active_rank_mask=args.active_rank_mask,
        timeout_sec=options.timeout_sec,
        comm=options.comm,
    )


def _combine_op(op: Any, args: _Combining, *more: torch.Tensor | None, **out: torch.Tensor) -> Any:
    """``more``: what a wait takes before the order."""
    options = args.options
    return op(
        args.expert_output,
        args.routing,
        *more,
        args.order,
        num_tokens=args.num_tokens,
        ep_size=options.ep_size,
        active_rank_mask=args.active_rank_mask,
        timeout_sec=options.timeout_sec,
        comm=options.comm,
        **out,
    )


def _dispatch(args: _Dispatching, waiting: _Waiting | None = None) -> tuple[torch.Tensor, ...]:
    options = args.options
    through = collectives.find_collective(options.comm)
    if through is not None:
        return collectives.dispatch(
            through,
            *args[:4],
            args.eplb_local_stats,
            args.active_rank_mask,
            tokens_per_rank=options.tokens_per_rank,
            num_experts=options.num_experts,
            ep_size=options.ep_size,
            invalid_expert_id=options.invalid_expert_id,
        )
    if waiting is None:
        return _dispatch_op(torch.ops.moe_ep.dispatch, args)
    return _dispatch_op(torch.ops.moe_ep.dispatch_wait, args, *waiting)


def _combine(args: _Combining, waiting: _Waiting | None = None) -> torch.Tensor:
    options = args.options
    through = collectives.find_collective(options.comm)
    if through is not None:
        return collectives.combine(
            through, args.expert_output, args.routing, args.active_rank_mask, num_tokens=args.num_tokens,
            ep_size=options.ep_size,
        )
    if waiting is None:
        return _combine_op(torch.ops.moe_ep.combine, args)
    return _combine_op(torch.ops.moe_ep.combine_wait, args, *waiting)


class _Dispatch(torch.autograd.Function):
    """Its backward is a combine: the gradient of a token is the sum of the gradients of its copies."""

    @staticmethod
    def forward(ctx, hidden_states, topk_ids, topk_weights, hidden_states_scale, order, eplb_local_stats,  # type: ignore[no-untyped-def]
                active_rank_mask, options, token, after):
        waiting = None if token is None else _Waiting(token, after)
        args = _Dispatching(hidden_states, topk_ids, topk_weights, hidden_states_scale, order, eplb_local_stats,
                            active_rank_mask, options)
        out = _dispatch(args, waiting)
        hidden, ids, weights, scale, stats, routing = out
        # Quantized rows, or rows of a frozen model, want no gradient where only the weights do; theirs would be wasted,
        # and in FP8 there is none.
        constant = () if ctx.needs_input_grad[0] else (hidden,)
        ctx.mark_non_differentiable(ids, scale, stats, routing, *constant)
        ctx.save_for_backward(routing, order)
        ctx.num_tokens, ctx.active_rank_mask, ctx.options = hidden_states.shape[0], active_rank_mask, options
        ctx.has_weights = topk_weights is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_hidden, _ids, grad_weights, _scale, _stats, _routing):  # type: ignore[no-untyped-def]
        routing, order = ctx.saved_tensors
        home = lambda grad: _combine(  # noqa: E731
            _Combining(grad.flatten(1), routing, order, ctx.num_tokens, ctx.active_rank_mask, ctx.options)
        ).unflatten(1, grad.shape[1:])
        grad_hidden = home(grad_hidden) if ctx.needs_input_grad[0] else None
        grad_weights = home(grad_weights) if ctx.has_weights and ctx.needs_input_grad[2] else None
        return grad_hidden, None, grad_weights, *(None,) * 7


class _Combine(torch.autograd.Function):
    """Its backward is a dispatch: every copy of a token gets the token's gradient, empty rows get zeros."""

    @staticmethod
    def forward(ctx, expert_output, routing, order, num_tokens, active_rank_mask, options, token, after):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(routing, order)
        ctx.active_rank_mask, ctx.options = active_rank_mask, options
        waiting = None if token is None else _Waiting(token, after)
        return _combine(_Combining(expert_output, routing, order, num_tokens, active_rank_mask, options), waiting)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        routing, order = ctx.saved_tensors
        w = ctx.options.ep_size
        # routing names the target ranks of every token: as the ids of W experts, one per rank, they place the rows of
        # the gradient exactly where dispatch placed the tokens.
        targets = routing[1 + w :, : grad_output.shape[0]].t()
        options = ctx.options._replace(tokens_per_rank=routing.shape[1], num_experts=w)
        rows = _dispatch(_Dispatching(grad_output, targets, None, None, order, None, ctx.active_rank_mask, options))[0]
        holds_token = routing[1 : 1 + w].reshape(-1, 1) >= 0
        return torch.where(holds_token, rows, 0), *(None,) * 7
