"""The row contract over torch.distributed: one ``all_to_all_single`` of static shape per op, in plain traceable torch.

What the functions of functional.py call in the place of the one-sided ops where the communicator is of this kind. Every
rank sends R rows to every rank, so shapes depend on integers alone; a slot whose token is not meant for that rank
travels all the same, and only its ids say so. Own rows go the same way: the collective copies them on the spot, and the
code stays the same on every rank. Legend (T, K, H, E, W, R) as in the README.

A message to one rank, in bytes: R records, then the n EPLB statistics (int32). A record is

    hidden row | scale row, if any | K weights, if any | K ids (int32)

without padding. In this way a dispatch is a single collective: on small steps a second one costs more than copying the
fields out. Everything is put together by `cat`, which a compiler fuses; it would write slices one after the other.

Traced with symbols for sizes, T and R stay symbols. What a model does not change (W, K, E, widths of rows) becomes a
number by `index`: a compiler's algebra on products of all of them takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

import torch

_ops = torch.ops._c10d_functional
_COMBINED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Collective(NamedTuple):
    """How the ranks of a communicator reach each other."""

    process_group: str | None  # name of the torch.distributed group; None = a single rank, which needs none
    check_steps: bool  # whether ranks compare their steps before they send


_open: dict[str, Collective] = {}  # by the name in `comm`
_users: dict[str, int] = {}


def open_collective(name: str, collective: Collective) -> None:
    """Makes ``name`` mean ``collective`` until it is closed as often. Nothing lives between ops: names are shared."""
    _open[name] = collective
    _users[name] = _users.get(name, 0) + 1


def close_collective(name: str) -> None:
    """Gives up one use of ``name``; after the last one the name is unknown."""
    _users[name] -= 1
    if not _users[name]:
        del _open[name], _users[name]


def find_collective(name: str) -> Collective | None:
    """What is open under ``name`` here; None for the name of a one-sided communicator."""
    return _open.get(name)


def dispatch(
    through: Collective,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    hidden_states_scale: torch.Tensor | None,
    eplb_local_stats: torch.Tensor | None,
    active_rank_mask: torch.Tensor | None,
    *,
    tokens_per_rank: int,
    num_experts: int,
    ep_size: int,
    invalid_expert_id: int,
) -> tuple[torch.Tensor, ...]:
    """Takes and returns what ``torch.ops.moe_ep.dispatch`` does. Rows of ``routing`` [1 + W + min(K, W), R]: zeros; one
    per source rank, 0 where its row holds a token and -1 elsewhere; the j-th target rank of each own token, or -1."""
    _check_dispatch(hidden_states, topk_ids, topk_weights, hidden_states_scale, eplb_local_stats, tokens_per_rank,
                    num_experts, invalid_expert_id)
    _refuse_mask("dispatch", active_rank_mask)
    w, r, k, tokens = index(ep_size), tokens_per_rank, index(topk_ids.shape[1]), topk_ids.shape[0]
    num_experts, invalid_expert_id = index(num_experts), index(invalid_expert_id)
    fields = [tensor for tensor in (hidden_states, hidden_states_scale, topk_weights) if tensor is not None]
    fields = [tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1) for tensor in fields]
    widths = [index(tensor.shape[1]) * tensor.element_size() for tensor in fields]
    record = sum(widths) + 4 * k
    n = 0 if eplb_local_stats is None else index(eplb_local_stats.shape[0])
    device = hidden_states.device
    if through.check_steps:
        width = dict.fromkeys(("scale", "weights"), 0)
        if hidden_states_scale is not None:
            width["scale"] = widths[1]
        if topk_weights is not None:
            width["weights"] = widths[-1]
        _check_step(through, "dispatch", ep_size, device,
                    [r, k, num_experts, invalid_expert_id, widths[0], width["scale"], width["weights"], n])

    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    owner = torch.where(valid, _owner(torch.where(valid, topk_ids, 0), num_experts, w), -1).int()  # [T, K]
    meant = (owner == torch.arange(w, device=device).view(w, 1, 1)).any(2)  # [W, T]: goes to that rank

    ids = torch.where(valid & meant.unsqueeze(2), topk_ids, invalid_expert_id).int()  # [W, T, K]
    unused = torch.full((w, r - tokens, k), invalid_expert_id, dtype=torch.int32, device=device)
    payload = [torch.cat([rows, rows.new_empty(r - tokens, rows.shape[1])]) for rows in fields]
    message = torch.cat(
        [*(rows.view(torch.uint8).expand(w, -1, -1) for rows in payload),
         torch.cat([ids, unused], 1).view(torch.uint8)], 2,
    ).view(w, r * record)
    if eplb_local_stats is not None:
        message = torch.cat([message, eplb_local_stats.clone().view(torch.uint8).expand(w, -1)], 1)

    received = _all_to_all(through, message)
    records = received[:, : r * record].view(w, r, record)
    columns, begin = [], 0
    for rows, row_bytes in zip(fields, widths, strict=True):
        columns.append(_fresh(records[:, :, begin : begin + row_bytes], rows.dtype, [w * r, rows.shape[1]]))
        begin += row_bytes
    ids = _fresh(records[:, :, begin:], torch.int32, [w * r, k])
    hidden = columns[0].view(w * r, *hidden_states.shape[1:])
    weights = hidden_states.new_empty(0) if topk_weights is None else columns.pop()
    scale = hidden_states.new_empty(0)
    if hidden_states_scale is not None:
        scale = columns.pop().view(w * r, *hidden_states_scale.shape[1:])
    stats = hidden_states.new_empty(0, dtype=torch.int32)
    if eplb_local_stats is not None:
        stats = _fresh(received[:, r * record :], torch.int32, [w, n])

    holds_token = (ids != invalid_expert_id).any(1).view(w, r)
    targets = _targets(owner, min(k, w))
    routing = torch.cat([
        torch.zeros(1, r, dtype=torch.int32, device=device),
        holds_token.int() - 1,
        torch.cat([targets, targets.new_full((targets.shape[0], r - tokens), -1)], 1),
    ])
    return hidden, ids, weights, scale, stats, routing


def combine(
    through: Collective,
    expert_output: torch.Tensor,
    routing: torch.Tensor,
    active_rank_mask: torch.Tensor | None,
    *,
    num_tokens: int,
    ep_size: int,
) -> torch.Tensor:
    """Takes and returns what ``torch.ops.moe_ep.combine`` does; the bits are those of the one-sided backends."""
    _check_combine(expert_output, routing, num_tokens, ep_size)
    _refuse_mask("combine", active_rank_mask)
    w, r, h = index(ep_size), routing.shape[1], index(expert_output.shape[1])
    m = index(routing.shape[0]) - 1 - w
    if through.check_steps:
        kind = _COMBINED.index(expert_output.dtype)
        _check_step(through, "combine", w, expert_output.device, [r, h, kind, m, 0, 0, 0, 0])
    landed = _all_to_all(through, expert_output.contiguous().view(w, r * h)).view(w * r, h)
    targets = routing[1 + w :, :num_tokens]  # [M, T]
    used = (targets >= 0).unsqueeze(2)
    slots = torch.where(targets >= 0, targets * r + torch.arange(num_tokens, device=routing.device), 0)
    wide = torch.promote_types(expert_output.dtype, torch.float32)
    # The first partial is taken as it is: 0 + -0.0 would be 0. Later ones are added where there are any.
    total = torch.where(used[0], landed.index_select(0, slots[0]).to(wide), 0)
    for j in range(1, m):
        total = torch.where(used[j], total + landed.index_select(0, slots[j]).to(wide), total)
    if wide == expert_output.dtype:  # A conversion that does nothing would give `total` a second name, and traced by
        return total  # torch 2.11 the gradient goes to one of them and is looked for at the other.
    return total.to(expert_output.dtype)


def combine_out(
    through: Collective,
    expert_output: torch.Tensor,
    routing: torch.Tensor,
    active_rank_mask: torch.Tensor | None,
    out: torch.Tensor,
    *,
    num_tokens: int,
    ep_size: int,
) -> None:
    """:func:`combine` into ``out``, of any strides."""
    if out.dtype != expert_output.dtype:
        raise TypeError(f"combine: out: expected {expert_output.dtype} (that of expert_output), got {out.dtype}")
    if out.dim() != 2:
        raise ValueError(f"combine: out: expected [T, H], got {out.dim()} dimensions")
    _check_device("combine", "out", out, expert_output, "expert_output")
    _need(out.shape[0] == num_tokens, lambda: "combine: out: expected num_tokens rows", num_tokens, out.shape[0])
    _need(out.shape[1] == expert_output.shape[1], lambda: "combine: out: expected the columns of expert_output",
          expert_output.shape[1], out.shape[1])
    out.copy_(combine(through, expert_output, routing, active_rank_mask, num_tokens=num_tokens, ep_size=ep_size))


# --- Movement ---------------------------------------------------------------------------------------------------------


def _all_to_all(through: Collective, message: torch.Tensor) -> torch.Tensor:
    """Row w of ``[W, *]`` goes to rank w; row s of the result came from rank s."""
    if through.process_group is None:
        return message
    w = message.shape[0]
    return _ops.wait_tensor(_ops.all_to_all_single(message, [1] * w, [1] * w, through.process_group))


def _fresh(columns: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A field of the records, as bytes, in memory of its own: a view would be strided and keep a message alive."""
    return columns.clone(memory_format=torch.contiguous_format).flatten().view(dtype).view(shape)


def _owner(expert: torch.Tensor, num_experts: int, ep_size: int) -> torch.Tensor:
    """The rank of each expert id; blocks as in :meth:`MoEEpCommParams.local_experts`."""
    per_rank, wide = divmod(num_experts, ep_size)
    in_wide = expert < wide * (per_rank + 1)
    later = wide + (expert - wide * (per_rank + 1)) // max(per_rank, 1)
    return torch.where(in_wide, expert // (per_rank + 1), later)


def _targets(owner: torch.Tensor, m: int) -> torch.Tensor:
    """``[m, T]``: the distinct ranks of each row of ``owner`` ``[T, K]`` in order of first appearance, then -1.

    >>> _targets(torch.tensor([[2, -1, 2, 0]], dtype=torch.int32), 3).flatten().tolist()
    [2, 0, -1]
    """
    k = owner.shape[1]
    earlier = torch.ones(k, k, dtype=torch.bool, device=owner.device).tril(-1)
    seen = ((owner.unsqueeze(2) == owner.unsqueeze(1)) & earlier).any(2)
    first = (owner >= 0) & ~seen  # [T, K]
    place = first.cumsum(1) - 1
    at_j = first & (place == torch.arange(m, device=owner.device).view(m, 1, 1))  # [m, T, K]
    return torch.where(at_j, owner, -1).amax(2)


# --- Checks -----------------------------------------------------------------------------------------------------------

_HEADER = {
    "dispatch": (
        "tokens_per_rank",
        "top_k",
        "num_experts",
        "invalid_expert_id",
        "the bytes of a hidden row",
        "the bytes of a row of hidden_states_scale (0 = not passed)",
        "the bytes of a row of topk_weights (0 = not passed)",
        "the length of eplb_local_stats (0 = not passed)",
    ),
    "combine": (
        "tokens_per_rank",
        "the columns of expert_output",
        "the dtype of expert_output (0 bfloat16, 1 float16, 2 float32, 3 float64)",
        "min(top_k, ep_size)",
        *("",) * 4,
    ),
}
_KINDS = list(_HEADER)


def _check_step(through: Collective, op: str, ep_size: int, device: torch.device, values: list[int]) -> None:
    """Ranks that disagree about a step would receive garbage, hang, or (gloo) abort: so all of them are told first."""
    if through.process_group is None:
        return
    mine = torch.tensor([_KINDS.index(op), *values], dtype=torch.int64, device=device)
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(mine, ep_size, through.process_group))
    headers = gathered.view(ep_size, len(values) + 1)
    if torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(
            (headers == mine).all(),
            f"{op}: ranks disagree about the step; call it outside torch.compile to learn which rank has what",
        )
        return
    rows = headers.tolist()
    here = mine.tolist()
    for rank, there in enumerate(rows):
        if there != here:
            me = _me(through)
            field = next(i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
            name = "the op" if field == 0 else _HEADER[op][field - 1]
            a, b = (_KINDS[v] if field == 0 else v for v in (here[field], there[field]))
            raise RuntimeError(f"{op}: ranks disagree about {name}: rank {me} has {a}, rank {rank} has {b}; "
                               "it must be the same on every rank")


def _me(through: Collective) -> int:
    group = torch.distributed.distributed_c10d._resolve_process_group(through.process_group)  # type: ignore[arg-type]
    return group.rank()


def _need(condition: Any, text: Callable[[], str], expected: Any, got: Any) -> None:
    """A condition on sizes. Traced, it becomes an assumption of the graph (``text`` must close over nothing then)."""
    if torch.compiler.is_compiling():
        torch._check(condition, text)
    elif not condition:
        raise ValueError(f"{text()}: {expected}, got {got}")


def _check_device(op: str, name: str, tensor: torch.Tensor, like: torch.Tensor, like_name: str) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{op}: {name}: expected device {like.device} (that of {like_name}), got {tensor.device}")


def _refuse_mask(op: str, active_rank_mask: torch.Tensor | None) -> None:
    if active_rank_mask is not None:
        raise ValueError(
            f"{op}: active_rank_mask: expected None, for a collective waits for every rank of its group; take a "
            "one-sided backend, or make a process group without the rank"
        )


def _check_dispatch(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    scale: torch.Tensor | None,
    stats: torch.Tensor | None,
    tokens_per_rank: int,
    num_experts: int,
    invalid_expert_id: int,
) -> None:
    """The checks and, in eager mode, nearly the sentences of meta/shapes.cpp."""
    if num_experts < 1:
        raise ValueError(f"dispatch: num_experts: expected at least 1, got {num_experts}")
    if 0 <= invalid_expert_id < num_experts or not -(2**31) <= invalid_expert_id < 2**31:
        raise ValueError("dispatch: invalid_expert_id: expected a 32-bit value outside "
                         f"[0, num_experts={num_experts}), got {invalid_expert_id}")
    if hidden.dim() < 2:
        raise ValueError(f"dispatch: hidden_states: expected [T, *] with at least 2 dimensions, got {hidden.dim()}")
    if ids.dim() != 2:
        raise ValueError(f"dispatch: topk_ids: expected [T, K], got {ids.dim()} dimensions")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"dispatch: topk_ids: expected int32 or int64, got {ids.dtype}")
    tokens, k = hidden.shape[0], ids.shape[1]
    _check_device("dispatch", "topk_ids", ids, hidden, "hidden_states")
    _need(ids.shape[0] == tokens, lambda: "dispatch: topk_ids: expected the rows of hidden_states", tokens,
          ids.shape[0])
    _need(k >= 1, lambda: "dispatch: topk_ids: expected K of at least", 1, k)
    _need(tokens <= tokens_per_rank, lambda: "dispatch: tokens_per_rank: expected at least the rows of hidden_states",
          tokens, tokens_per_rank)
    if weights is not None:
        if not weights.is_floating_point():
            raise TypeError(f"dispatch: topk_weights: expected a floating-point dtype, got {weights.dtype}")
        if weights.dim() != 2:
            raise ValueError(f"dispatch: topk_weights: expected [T, K], got {weights.dim()} dimensions")
        _check_device("dispatch", "topk_weights", weights, hidden, "hidden_states")
        _need(weights.shape[0] == tokens, lambda: "dispatch: topk_weights: expected the rows of hidden_states", tokens,
              weights.shape[0])
        _need(weights.shape[1] == k, lambda: "dispatch: topk_weights: expected the K columns of topk_ids", k,
              weights.shape[1])
    if scale is not None:
        if scale.dim() < 1:
            raise ValueError("dispatch: hidden_states_scale: expected [T, *], got a scalar")
        _check_device("dispatch", "hidden_states_scale", scale, hidden, "hidden_states")
        _need(scale.shape[0] == tokens, lambda: "dispatch: hidden_states_scale: expected the rows of hidden_states",
              tokens, scale.shape[0])
    if stats is not None:
        if stats.dtype != torch.int32:
            raise TypeError(f"dispatch: eplb_local_stats: expected int32, got {stats.dtype}")
        if stats.dim() != 1:
            raise ValueError(f"dispatch: eplb_local_stats: expected [n], got {stats.dim()} dimensions")
        _check_device("dispatch", "eplb_local_stats", stats, hidden, "hidden_states")


def _check_combine(expert_output: torch.Tensor, routing: torch.Tensor, num_tokens: int, ep_size: int) -> None:
    if expert_output.dtype not in _COMBINED:
        raise TypeError("combine: expert_output: expected bfloat16, float16, float32 or float64, got "
                        f"{expert_output.dtype}")
    if expert_output.dim() != 2:
        raise ValueError(f"combine: expert_output: expected [W*R, H], got {expert_output.dim()} dimensions")
    if routing.dtype != torch.int32:
        raise TypeError(f"combine: routing: expected the int32 tensor of a dispatch, got {routing.dtype}")
    if routing.dim() != 2 or routing.shape[0] < 2 + ep_size:
        raise ValueError(f"combine: routing: expected [1 + ep_size + M, R] of a dispatch of ep_size {ep_size}, got "
                         f"shape {tuple(routing.shape)}")
    _check_device("combine", "routing", routing, expert_output, "expert_output")
    r = routing.shape[1]
    _need(expert_output.shape[0] == r * ep_size,
          lambda: "combine: expert_output: expected one row per row received, ep_size * tokens_per_rank", r * ep_size,
          expert_output.shape[0])
    _need(num_tokens >= 0, lambda: "combine: num_tokens: expected at least", 0, num_tokens)
    _need(num_tokens <= r, lambda: "combine: num_tokens: expected at most tokens_per_rank", r, num_tokens)
