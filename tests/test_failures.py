"""What goes wrong is said in a sentence that names it, on every rank, and leaves nothing behind."""

from __future__ import annotations

import glob
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, Step, group_for, make_group, rank_mask
from ranks import Rank, RankError, RankPool

import torch_moe_ep
from torch_moe_ep import MoEEpCommunication

CASE = Case("bad input", tokens=(4,), top_k=2, hidden=16, num_experts=6, spare_rows=1, spare_capacity=1)
R, C = 5, 6


@dataclass
class Call:
    """The arguments of one good dispatch or combine on two ranks, for a test to spoil."""

    group: Any
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.group.order.device
        self.dispatch_args = {
            "hidden_states": torch.zeros(4, 16, device=device),
            "topk_ids": torch.zeros(4, 2, dtype=torch.int64, device=device),
            "topk_weights": torch.zeros(4, 2, device=device),
            "hidden_states_scale": None,
            "order": self.group.order,
            "tokens_per_rank": R,
            "num_experts": 6,
            "ep_size": self.group.ep_size,
            "comm": self.group.comm,
        }
        self.combine_args = {
            "expert_output": torch.zeros(2 * R, 16, device=device),
            "routing": torch.full((1 + 2 + 2, R), -1, dtype=torch.int32, device=device),
            "order": self.group.order,
            "num_tokens": 4,
            "ep_size": self.group.ep_size,
            "comm": self.group.comm,
        }

    def dispatch(self, **spoilt: Any) -> None:
        torch.ops.moe_ep.dispatch(**{**self.dispatch_args, **spoilt})

    def combine(self, **spoilt: Any) -> None:
        torch.ops.moe_ep.combine(**{**self.combine_args, **spoilt})

    def combine_out(self, out: torch.Tensor) -> None:
        torch.ops.moe_ep.combine_out(**self.combine_args, out=out)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


# What is called, the type it must raise, and words its text must have: the op, the argument, what was expected.
BAD: dict[str, tuple[Callable[[Call], None], type[Exception], tuple[str, ...]]] = {
    "ids of float": (lambda c: c.dispatch(topk_ids=torch.zeros(4, 2)), TypeError,
                     ("dispatch: topk_ids", "int32 or int64", "Float")),
    "ids of int16": (lambda c: c.dispatch(topk_ids=ints(4, 2).short()), TypeError, ("dispatch: topk_ids", "Short")),
    "ids of one dimension": (lambda c: c.dispatch(topk_ids=ints(4)), ValueError, ("dispatch: topk_ids", "[T, K]", "1")),
    "ids of other length": (lambda c: c.dispatch(topk_ids=ints(3, 2)), ValueError, ("dispatch: topk_ids", "4", "3")),
    "K of 0": (lambda c: c.dispatch(topk_ids=ints(4, 0)), ValueError, ("dispatch: topk_ids", "1..32", "0")),
    "K of 33": (lambda c: c.dispatch(topk_ids=ints(4, 33)), ValueError, ("dispatch: topk_ids", "1..32", "33")),
    "K of other communicator": (lambda c: c.dispatch(topk_ids=ints(4, 3), topk_weights=None), ValueError,
                                ("dispatch: topk_ids: top_k", "2", "3")),
    "hidden of one dimension": (lambda c: c.dispatch(hidden_states=torch.zeros(4)), ValueError,
                                ("dispatch: hidden_states", "2 dimensions", "1")),
    "hidden too wide": (lambda c: c.dispatch(hidden_states=torch.zeros(4, 17)), ValueError,
                        ("dispatch: hidden_states", "64", "80")),
    "scale where none fits": (lambda c: c.dispatch(hidden_states_scale=torch.zeros(4, 1)), ValueError,
                              ("dispatch: hidden_states", "hidden_states_scale", "extra_payload_bytes_per_token")),
    "scale of other length": (lambda c: c.dispatch(hidden_states_scale=torch.zeros(3, 1)), ValueError,
                              ("dispatch: hidden_states_scale", "4", "3")),
    "scale of no dimension": (lambda c: c.dispatch(hidden_states_scale=torch.tensor(1.0)), ValueError,
                              ("dispatch: hidden_states_scale", "[T, *]")),
    "weights of int": (lambda c: c.dispatch(topk_weights=ints(4, 2)), TypeError,
                       ("dispatch: topk_weights", "floating-point", "Long")),
    "weights of one dimension": (lambda c: c.dispatch(topk_weights=torch.zeros(4)), ValueError,
                                 ("dispatch: topk_weights", "[T, K]")),
    "weights of other length": (lambda c: c.dispatch(topk_weights=torch.zeros(5, 2)), ValueError,
                                ("dispatch: topk_weights", "4 rows", "5")),
    "weights of other K": (lambda c: c.dispatch(topk_weights=torch.zeros(4, 1)), ValueError,
                           ("dispatch: topk_weights", "K = 2", "1")),
    "weights too wide": (lambda c: c.dispatch(topk_weights=torch.zeros(4, 2).double()), ValueError,
                         ("dispatch: topk_weights", "8", "16")),
    "T beyond R": (lambda c: c.dispatch(tokens_per_rank=3), ValueError, ("dispatch: tokens_per_rank", "4", "3")),
    "R below 0": (lambda c: c.dispatch(tokens_per_rank=-1), ValueError, ("dispatch: tokens_per_rank", "-1")),
    "R beyond C": (lambda c: c.dispatch(tokens_per_rank=C + 1), ValueError,
                   ("dispatch: tokens_per_rank", "6", "7", "max_tokens_per_rank")),
    "R beyond 32 bits": (lambda c: c.dispatch(tokens_per_rank=2**31), ValueError, ("dispatch: tokens_per_rank",)),
    "no experts": (lambda c: c.dispatch(num_experts=0), ValueError, ("dispatch: num_experts", "0")),
    "invalid id that is an expert": (lambda c: c.dispatch(invalid_expert_id=5), ValueError,
                                     ("dispatch: invalid_expert_id", "num_experts=6", "5")),
    "invalid id beyond 32 bits": (lambda c: c.dispatch(invalid_expert_id=2**31), ValueError,
                                  ("dispatch: invalid_expert_id", "32-bit", "2147483648")),
    "unknown communicator": (lambda c: c.dispatch(comm="nobody"), ValueError, ("comm", "'nobody'", "open:")),
    "communicator without a name": (lambda c: c.dispatch(comm=""), ValueError, ("comm", "''", "open:")),
    "other ep_size": (lambda c: c.dispatch(ep_size=4), ValueError, ("ep_size 2", "made for 4")),
    "ep_size of 0": (lambda c: c.dispatch(ep_size=0), ValueError, ("ep_size 2", "made for 0")),
    "timeout of 0": (lambda c: c.dispatch(timeout_sec=0), ValueError, ("dispatch: timeout_sec", "0")),
    "negative timeout": (lambda c: c.dispatch(timeout_sec=-5), ValueError, ("dispatch: timeout_sec", "-5")),
    "order of two elements": (lambda c: c.dispatch(order=torch.zeros(2)), ValueError, ("dispatch: order", "2")),
    "order of no dimension": (lambda c: c.dispatch(order=torch.tensor(0.0)), ValueError, ("dispatch: order", "0")),
    "mask without rank masks": (lambda c: c.dispatch(active_rank_mask=rank_mask([0], 2)), ValueError,
                                ("dispatch: active_rank_mask", "enable_rank_mask")),
    "mask of int32": (lambda c: c.dispatch(active_rank_mask=torch.ones(1).int()), TypeError,
                      ("dispatch: active_rank_mask", "uint64", "Int")),
    "mask of two words": (lambda c: c.dispatch(active_rank_mask=ints(2)), ValueError,
                          ("dispatch: active_rank_mask", "1 words", "2")),
    "mask of two dimensions": (lambda c: c.dispatch(active_rank_mask=ints(1, 1)), ValueError,
                               ("dispatch: active_rank_mask", "1 dimension or none", "2")),
    "statistics of int64": (lambda c: c.dispatch(eplb_local_stats=ints(3)), TypeError,
                            ("dispatch: eplb_local_stats", "int32", "Long")),
    "statistics of two dimensions": (lambda c: c.dispatch(eplb_local_stats=ints(3, 1).int()), ValueError,
                                     ("dispatch: eplb_local_stats", "[n]")),
    "statistics where none fit": (lambda c: c.dispatch(eplb_local_stats=ints(3).int()), ValueError,
                                  ("dispatch: eplb_local_stats", "0", "3", "eplb_stats_num_experts")),
    "expert output of int": (lambda c: c.combine(expert_output=ints(2 * R, 16)), TypeError,
                             ("combine: expert_output", "bfloat16", "Long")),
    "expert output of other length": (lambda c: c.combine(expert_output=torch.zeros(2 * R + 1, 16)), ValueError,
                                      ("combine: expert_output", "10", "11")),
    "expert output of one dimension": (lambda c: c.combine(expert_output=torch.zeros(2 * R)), ValueError,
                                       ("combine: expert_output", "[W*R, H]", "1")),
    "expert output too wide": (lambda c: c.combine(expert_output=torch.zeros(2 * R, 17)), ValueError,
                               ("combine: expert_output", "64", "68")),
    "expert output of more ranks' rows than fit": (
        lambda c: c.combine(expert_output=torch.zeros(2 * 7, 16), routing=torch.full((5, 7), -1).int()), ValueError,
        ("combine: expert_output", "6", "7", "max_tokens_per_rank")),
    "routing of int64": (lambda c: c.combine(routing=ints(5, R)), TypeError, ("combine: routing", "int32", "Long")),
    "routing of one dimension": (lambda c: c.combine(routing=ints(5).int()), ValueError, ("combine: routing", "1")),
    "routing of other ep_size": (lambda c: c.combine(routing=ints(3, R).int()), ValueError,
                                 ("combine: routing", "ep_size", "3")),
    "routing of other K": (lambda c: c.combine(routing=ints(6, R).int()), ValueError, ("combine: routing", "2", "3")),
    "negative num_tokens": (lambda c: c.combine(num_tokens=-1), ValueError, ("combine: num_tokens", "-1")),
    "num_tokens beyond R": (lambda c: c.combine(num_tokens=R + 1), ValueError, ("combine: num_tokens", "5", "6")),
    "combine on nobody": (lambda c: c.combine(comm="nobody"), ValueError, ("comm", "'nobody'")),
    "combine with other ep_size": (
        lambda c: c.combine(ep_size=1, expert_output=torch.zeros(R, 16), routing=torch.full((3, R), -1).int()),
        ValueError, ("ep_size 2", "made for 1")),
    "combine with negative timeout": (lambda c: c.combine(timeout_sec=-1), ValueError, ("combine: timeout_sec", "-1")),
    "combine with a mask without rank masks": (lambda c: c.combine(active_rank_mask=rank_mask([0], 2)), ValueError,
                                               ("combine: active_rank_mask", "enable_rank_mask")),
    "out of other dtype": (lambda c: c.combine_out(torch.zeros(4, 16).double()), TypeError,
                           ("combine_out: out", "Float", "Double")),
    "out of other length": (lambda c: c.combine_out(torch.zeros(3, 16)), ValueError, ("combine_out: out", "4", "3")),
    "out of other width": (lambda c: c.combine_out(torch.zeros(4, 15)), ValueError, ("combine_out: out", "16", "15")),
    "out of one dimension": (lambda c: c.combine_out(torch.zeros(4)), ValueError, ("combine_out: out", "[T, H]", "1")),
}


def caught(function: Callable[[], Any]) -> tuple[type[BaseException] | None, str]:
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None, "nothing raised"


def told(rank: Rank, call: Callable[[], Any], another: Callable[[], Any]) -> None:
    """Makes the call that ends in an error. A kernel cannot raise: there the next call does, and sends nothing."""
    call()
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
        another()


def run_bad_input(rank: Rank) -> list[str]:
    """Makes every bad call on a live communicator, a good step after each; returns what was not as it must be."""
    wrong = []
    group = make_group(CASE, 2, rank.rank, rank.device)
    try:
        call = Call(group)
        for n, (name, (bad, kind, words)) in enumerate(BAD.items()):
            rounds = group.describe()["rounds"]
            with rank.device:
                got, text = caught(lambda bad=bad: bad(call))
            missing = [word for word in words if word not in text]
            if got is not kind or missing or group.describe()["rounds"] != rounds:
                wrong.append(f"{name}: {got}, missing {missing}: {text}")
            step = Step(CASE, 2, rank.rank, n, rank.device)
            step.dispatch(group)
            step.combine(group)
    finally:
        group.destroy()
    return wrong


def test_bad_input(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(run_bad_input) == [[], []]


def run_other_device(rank: Rank) -> None:
    group = make_group(CASE, 2, rank.rank, rank.device)
    try:
        call = Call(group)
        with pytest.raises(ValueError, match="dispatch: topk_ids: expected device"):
            call.dispatch(topk_ids=ints(4, 2).to("meta"))
        with pytest.raises(ValueError, match="dispatch: order: expected device"):
            call.dispatch(order=torch.zeros(1, device="meta"))
        with pytest.raises(ValueError, match="combine: routing: expected device"):
            call.combine(routing=call.combine_args["routing"].to("meta"))
        step = Step(CASE, 2, rank.rank, 0, rank.device)
        step.dispatch(group)
        step.combine(group)
    finally:
        group.destroy()


def test_tensors_on_other_devices(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_other_device)


def run_use_after_close(rank: Rank) -> None:
    group = make_group(CASE, 2, rank.rank, rank.device)
    call = Call(group)
    group.destroy()
    for op in (call.dispatch, call.combine):
        with pytest.raises(ValueError, match=f"no communicator named '{group.comm}' is open.*closed"):
            op()
    for method in (lambda: group.dispatch(torch.zeros(4, 16), ints(4, 2)), group.describe, group.last_error):
        with pytest.raises(RuntimeError, match="has been destroyed"):
            method()


def test_use_after_close(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_use_after_close)


# How the last rank differs, and what every rank's sentence says about it.
DISAGREEMENTS = {
    "tokens_per_rank": (lambda c: c.dispatch(tokens_per_rank=R + 1), ("tokens_per_rank", "5", "6")),
    "the op": (lambda c: c.combine(), ("the op", "dispatch", "combine")),
    "top_k": (lambda c: c.dispatch(topk_ids=c.dispatch_args["topk_ids"][:, :1], topk_weights=None),
              ("top_k", "2", "1")),
    "num_experts": (lambda c: c.dispatch(num_experts=5), ("num_experts", "6", "5")),
    "weights": (lambda c: c.dispatch(topk_weights=None), ("topk_weights", "8", "0")),
    "hidden": (lambda c: c.dispatch(hidden_states=c.dispatch_args["hidden_states"][:, :8]), ("hidden row", "64", "32")),
    "scale": (lambda c: c.dispatch(hidden_states_scale=c.dispatch_args["hidden_states"][:, :1]),
              ("hidden_states_scale", "0", "4")),
    "statistics": (lambda c: c.dispatch(eplb_local_stats=torch.zeros(2, dtype=torch.int32)),
                   ("eplb_local_stats", "0", "2")),
}


def run_disagreement(rank: Rank, name: str) -> tuple[type[BaseException] | None, str]:
    w = rank.world_size
    group = make_group(replace(CASE, scale=(torch.float32, 4), eplb=3), w, rank.rank, rank.device)
    try:
        call = Call(group)
        call.combine_args.update(  # of three ranks
            expert_output=torch.zeros(w * R, 16, device=rank.device),
            routing=torch.full((1 + w + 2, R), -1, dtype=torch.int32, device=rank.device),
        )
        with rank.device:
            odd = DISAGREEMENTS[name][0] if rank.rank == w - 1 else Call.dispatch
            outcome = caught(lambda: told(rank, lambda: odd(call), lambda: Call.dispatch(call)))
        for seed in range(3):
            step = Step(CASE, w, rank.rank, seed, rank.device)
            step.dispatch(group)
            step.combine(group)
        assert group.last_error() is None
        return outcome
    finally:
        group.destroy()


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_between_ranks(ranks: Callable[[int], RankPool], name: str) -> None:
    """All ranks are told, with both ranks and both values, and go on."""
    words = DISAGREEMENTS[name][1]
    for rank, (kind, text) in enumerate(ranks(3).run(run_disagreement, name)):
        assert kind is RuntimeError, (rank, text)
        peers = ("rank 2",) if rank < 2 else ("rank 0", "rank 1")
        assert f"rank {rank} has" in text and any(f"{peer} has" in text for peer in peers), text
        assert all(word in text for word in (*words, "round 1")), text


def run_other_routing(rank: Rank) -> None:
    """Rank 1 combines an older dispatch than the others."""
    group = make_group(CASE, 2, rank.rank, rank.device)
    try:
        old, new = (Step(CASE, 2, rank.rank, seed, rank.device) for seed in range(2))
        old.dispatch(group)
        new.dispatch(group)
        mine = old if rank.rank else new
        call = lambda: torch_moe_ep.combine(  # noqa: E731
            group, mine.expert_output.to(rank.device), mine.routing, num_tokens=len(mine.inputs.topk_ids)
        )
        kind, text = caught(lambda: told(rank, call, call))
        assert kind is RuntimeError and "routing" in text and "has 1" in text and "has 2" in text, text
        old.combine(group)
        new.combine(group)
    finally:
        group.destroy()


def test_routing_of_different_dispatches(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_other_routing)


def windows_of(pids: list[int | None]) -> list[str]:
    return [path for pid in pids for path in glob.glob(f"/dev/shm/moe_ep_{pid}_*")]


GROUPS: dict[str, MoEEpCommunication] = {}
"""Of this process, between the calls of a test into a pool of its own."""


def run_first_step(rank: Rank) -> list[str]:
    GROUPS["group"] = group = make_group(CASE, rank.world_size, rank.rank, rank.device)
    step = Step(CASE, rank.world_size, rank.rank, 0, rank.device)
    step.dispatch(group)
    step.combine(group)
    return windows_of([os.getpid()])


def run_next_step(rank: Rank, lost: int, how: str) -> tuple[type[BaseException] | None, str, str, str | None]:
    """Rank ``lost`` dies or raises in the place of its dispatch; what the others hear, then, and from last_error()."""
    group = GROUPS["group"]
    group.timeout_sec = 2
    dist.barrier()
    if rank.rank == lost:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("something else")
    step = Step(CASE, rank.world_size, rank.rank, 1, rank.device)
    kind, text = caught(lambda: step.dispatch(group))
    again = caught(lambda: step.dispatch(group))[1]
    return kind, text, again, group.last_error()


def run_combine_without(rank: Rank, lost: int) -> tuple[type[BaseException] | None, str, str, str | None]:
    """Rank ``lost`` is killed between its dispatch and its combine."""
    group = GROUPS["group"]
    step = Step(CASE, rank.world_size, rank.rank, 1, rank.device)
    step.dispatch(group)
    group.timeout_sec = 2
    dist.barrier()
    if rank.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    kind, text = caught(lambda: step.combine(group))
    again = caught(lambda: step.combine(group))[1]
    return kind, text, again, group.last_error()


def check_sentences(outcomes: list[Any], lost: int, op: str, round: int) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank == lost:
            continue
        kind, text, again, last = outcome
        assert kind is RuntimeError
        for words in (f"{op} round {round} on rank {rank}", "waited 2 s", f"for rank {lost}"):
            assert words in text, text
        assert "cannot be used again after" in again and text.split("\n")[0] in again, again
        assert last == text.split("\n")[0]


@pytest.mark.parametrize("how", ["killed", "raised"])
@pytest.mark.parametrize("lost", [0, 1])
def test_rank_lost_before_dispatch(lost: int, how: str) -> None:
    with RankPool(3) as pool:
        pids = [process.pid for process in pool.processes]
        assert pool.run(run_first_step) == [[]] * 3  # once connected, a window has no name to leave behind
        outcomes = pool.outcomes(run_next_step, lost, how)
        check_sentences(outcomes, lost, "dispatch", 3)
        assert isinstance(outcomes[lost], RankError)
        assert outcomes[lost].error.startswith("died" if how == "killed" else "KeyError")
    assert windows_of(pids) == []
    killed = [-signal.SIGKILL if rank == lost and how == "killed" else 0 for rank in range(3)]
    assert [process.exitcode for process in pool.processes] == killed


def test_rank_killed_before_combine() -> None:
    with RankPool(3) as pool:
        pids = [process.pid for process in pool.processes]
        pool.run(run_first_step)
        outcomes = pool.outcomes(run_combine_without, 2)
        check_sentences(outcomes, 2, "combine", 4)
    assert windows_of(pids) == []


def test_normal_exit_leaves_nothing() -> None:
    """Without destroy(): the processes just end."""
    with RankPool(2) as pool:
        pids = [process.pid for process in pool.processes]
        pool.run(run_first_step)
    assert windows_of(pids) == []
    assert [process.exitcode for process in pool.processes] == [0, 0]


def run_two_threads(rank: Rank) -> None:
    group = make_group(CASE, 2, rank.rank, rank.device)
    try:
        step = Step(CASE, 2, rank.rank, 0, rank.device)
        if rank.rank == 1:
            dist.barrier()  # rank 0's thread is inside its dispatch until this one comes
            step.dispatch(group)
        else:
            errors: list[Any] = []
            thread = threading.Thread(target=lambda: errors.append(caught(lambda: step.dispatch(group))))
            thread.start()
            while group.describe()["rounds"] == 0:
                threading.Event().wait(0.001)
            with pytest.raises(ValueError, match="in use by another thread"):
                Step(CASE, 2, rank.rank, 1, rank.device).dispatch(group)
            dist.barrier()
            thread.join()
            assert errors == [(None, "nothing raised")]
        step.combine(group)
    finally:
        group.destroy()


def test_two_threads_on_one_communicator() -> None:
    with RankPool(2) as pool:
        pool.run(run_two_threads)


def test_a_traced_size_is_checked_against_the_live_communicator(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_other_size)


def run_other_size(rank: Rank) -> None:
    """A graph holds the ep_size it was traced for; here a single-rank communicator takes the place of a larger one."""
    alone = make_group(CASE, 1, 0, rank.device) if rank.rank == 0 else None
    if alone is not None:
        view = SimpleNamespace(**{**vars(group_for(CASE, alone)), "ep_size": 2})
        with pytest.raises(ValueError, match="has ep_size 1, this call .* was made for 2"):
            torch_moe_ep.dispatch(view, torch.zeros(4, 16, device=rank.device), ints(4, 2).to(rank.device))
        step = Step(CASE, 1, 0, 0, rank.device)
        step.dispatch(alone)
        step.combine(alone)
        alone.destroy()
