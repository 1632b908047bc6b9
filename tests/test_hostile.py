"""Uses that nobody intends and somebody tries: each of them once crashed, hung or gave a wrong result in silence."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import backend_config
from ranks import Rank, RankPool

import torch_moe_ep
from torch_moe_ep import (
    _C,
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    combine,
    create_communication,
    create_local_group,
    dispatch,
    run_local_group,
)

T, H = 6, 32


def group_of(rank: Rank, **options: Any) -> MoEEpCommunication:
    params = MoEEpCommParams(4, 2, T, options.pop("hidden", H), dtype=torch.float32)
    namespace = options.pop("namespace", "")
    config = backend_config(rank.device, timeout_sec=options.pop("timeout_sec", 20), **options)
    return create_communication(BootstrapConfig(rank.world_size, rank.rank), params, config, namespace=namespace)


def everywhere(device: torch.device | str = "cpu") -> torch.Tensor:
    """Ids that name an expert of both ranks of two."""
    return torch.tensor([[0, 3]] * T, device=device)


def run_output_over_input(rank: Rank) -> None:
    group = group_of(rank)
    y = torch.randn(2 * T + 4, H, device=rank.device)
    received = dispatch(group, y[:T], everywhere(rank.device))
    expected = combine(group, y[: 2 * T], received.routing, num_tokens=T)
    combine(group, y[: 2 * T], received.routing, num_tokens=T, out=y[1 : T + 1])
    assert torch.equal(y[1 : T + 1], expected)
    group.destroy()


def test_output_that_overlaps_the_input(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_output_over_input)


def run_output_over_itself(rank: Rank) -> None:
    group = group_of(rank)
    received = dispatch(group, torch.ones(T, H, device=rank.device), everywhere(rank.device))
    for out in (
        torch.zeros(1, H, device=rank.device).expand(T, H),
        torch.zeros(T * H, device=rank.device).as_strided((T, H), (1, 1)),
    ):
        with pytest.raises(ValueError, match="out: expected elements that do not share memory"):
            combine(group, received.hidden_states, received.routing, num_tokens=T, out=out)
    assert (combine(group, received.hidden_states, received.routing, num_tokens=T) == 2).all()
    group.destroy()


def test_output_that_overlaps_itself(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_output_over_itself)


def run_masked_at_one_op(rank: Rank, masked_op: str) -> torch.Tensor:
    group = group_of(rank, enable_rank_mask=True)
    x, ids = torch.full((T, H), 777.0, device=rank.device), everywhere(rank.device)
    received = dispatch(group, x, ids)
    combine(group, received.hidden_states, received.routing, num_tokens=T)  # leaves 777 in the windows
    mask = group.active_rank_mask([rank.rank])  # type: ignore[attr-defined]
    at_dispatch, at_combine = (mask, None) if masked_op == "dispatch" else (None, mask)
    received = dispatch(group, torch.ones_like(x), ids, active_rank_mask=at_dispatch)
    out = combine(group, received.hidden_states, received.routing, num_tokens=T, active_rank_mask=at_combine)
    group.destroy()
    return out.cpu()


@pytest.mark.parametrize("masked_op", ["dispatch", "combine"])
def test_peer_masked_at_one_op_only(ranks: Callable[[int], RankPool], masked_op: str) -> None:
    """What a peer left in the windows in an earlier round is never summed, also when it is lost between two ops."""
    for out in ranks(2).run(run_masked_at_one_op, masked_op):
        assert (out == 1).all()


def run_meta_mask(rank: Rank) -> None:
    group = group_of(rank, enable_rank_mask=True)
    with pytest.raises(ValueError, match="active_rank_mask: expected a CPU tensor, got meta"):
        dispatch(group, torch.ones(T, H, device=rank.device), everywhere(rank.device),
                 active_rank_mask=torch.ones(1, dtype=torch.uint64, device="meta"))
    group.destroy()


def test_mask_on_the_meta_device(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_meta_mask)


def run_two_dtypes_of_one_size(rank: Rank) -> str:
    group = group_of(rank)
    received = dispatch(group, torch.ones(T, H), everywhere())
    rows = torch.ones(2 * T, H, dtype=(torch.float16, torch.bfloat16)[rank.rank])
    with pytest.raises(RuntimeError) as error:
        combine(group, rows, received.routing, num_tokens=T)
    group.destroy()
    return str(error.value)


def test_ranks_that_combine_in_two_dtypes_of_one_size() -> None:
    with RankPool(2) as pool:
        for text in pool.run(run_two_dtypes_of_one_size):
            assert "disagree about the dtype of expert_output" in text


def run_in_a_forked_child(rank: Rank) -> str:
    group = group_of(rank)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dispatch(group, torch.ones(T, H), everywhere())
            os.write(writer, b"accepted")
        except ValueError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reader, 4096).decode()
    received = dispatch(group, torch.ones(T, H), everywhere())
    assert (combine(group, received.hidden_states, received.routing, num_tokens=T) == 2).all()
    group.destroy()
    return text


def test_forked_child_is_no_rank() -> None:
    with RankPool(2) as pool:
        assert all("created before a fork" in text for text in pool.run(run_in_a_forked_child))


def test_deadline_beyond_the_clock(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_long_deadline)


def run_long_deadline(rank: Rank) -> None:
    group = group_of(rank, timeout_sec=10**12)
    if rank.rank == 0:
        time.sleep(0.2)
    received = dispatch(group, torch.ones(T, H, device=rank.device), everywhere(rank.device))
    assert (combine(group, received.hidden_states, received.routing, num_tokens=T) == 2).all()
    group.destroy()


def test_window_too_large_for_64_bits() -> None:
    with pytest.raises(ValueError, match="2.62 bytes or more"):
        create_communication(BootstrapConfig(1, 0), MoEEpCommParams(4, 2, 2**19, 2**43), "shm_one_sided")


def test_keyboard_interrupt_ends_a_wait() -> None:
    program = """
        import signal, torch, torch_moe_ep as ep
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started with the signal ignored
        groups = ep.create_local_group(2, ep.MoEEpCommParams(4, 2, 4, 16, torch.float32))
        print("waiting", flush=True)
        try:
            ep.dispatch(groups[0], torch.ones(2, 16), torch.zeros(2, 2, dtype=torch.int64))
        except RuntimeError as error:
            print("error:", error, flush=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)  # the op's own deadline is 300 s
    assert "was interrupted while it waited for rank 1" in out or "KeyboardInterrupt" in errors, (out, errors)


def test_copies_stand_for_the_same_windows() -> None:
    group = create_communication(BootstrapConfig(1, 0), MoEEpCommParams(4, 2, T, H, torch.float32), "shm_one_sided")
    assert copy.copy(group) is group and copy.deepcopy(group) is group
    with pytest.raises(TypeError, match="cannot be pickled; create one in each process"):
        pickle.dumps(group)
    group.destroy()


class Shuffled:
    """An exchange that gets the order of ranks wrong."""

    def __init__(self, entries: Callable[[Any], list[Any]]) -> None:
        self.entries = entries

    def allgather(self, obj: Any) -> list[Any]:
        return self.entries(obj)

    def barrier(self) -> None:
        pass


@pytest.mark.parametrize(
    "entries", [lambda obj: [obj, obj], lambda obj: [None, None], lambda obj: [obj], lambda obj: None]
)
def test_exchange_that_is_wrong(entries: Callable[[Any], Any]) -> None:
    config = backend_config("cpu", comm_backend=Shuffled(entries))
    with pytest.raises(ValueError, match="comm_backend: "):
        create_communication(BootstrapConfig(2, 0), MoEEpCommParams(4, 2, T, H), config)


def run_gradients_of_weights(rank: Rank) -> torch.Tensor:
    group = group_of(rank, hidden=1)
    weights = torch.ones(T, 2, device=rank.device, requires_grad=True)
    received = dispatch(group, torch.ones(T, 1, device=rank.device), everywhere(rank.device), weights)
    assert received.topk_weights is not None
    received.topk_weights.sum().backward()
    group.destroy()
    assert weights.grad is not None
    return weights.grad.cpu()


def test_gradients_of_weights_wider_than_a_row(ranks: Callable[[int], RankPool]) -> None:
    for grad in ranks(2).run(run_gradients_of_weights):
        assert (grad == 2).all()


def test_result_into_a_tensor_is_no_silent_end_of_gradients() -> None:
    group = create_communication(BootstrapConfig(1, 0), MoEEpCommParams(4, 2, T, H, torch.float32), "shm_one_sided")
    received = dispatch(group, torch.ones(T, H), everywhere())
    with pytest.raises(ValueError, match="out: a result written into a tensor is not differentiable"):
        combine(group, torch.ones(T, H, requires_grad=True), received.routing, num_tokens=T, out=torch.empty(T, H))
    saved = torch.ones(T, H, requires_grad=True)
    product = saved * (out := torch.full((T, H), 3.0))
    with torch.no_grad():
        combine(group, torch.ones(T, H), received.routing, num_tokens=T, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    group.destroy()


def run_named(rank: Rank) -> tuple[str, str, str]:
    first = group_of(rank, namespace="layers")
    other = group_of(rank, namespace="layers", hidden=2 * H)
    names = first.comm, other.comm
    first.destroy()
    again = group_of(rank, namespace="layers")
    again.destroy()
    other.destroy()
    return *names, again.comm


def test_a_namespace_gets_its_name_back(ranks: Callable[[int], RankPool]) -> None:
    for first, other, again in ranks(2).run(run_named):
        assert first == again and first.endswith(".2.layers") and other != first


def run_broken_window(rank: Rank) -> None:
    broken = group_of(rank, timeout_sec=1)
    if rank.rank == 0:
        with pytest.raises(RuntimeError, match="waited 1 s"):
            dispatch(broken, torch.ones(T, H), everywhere())
    fresh = group_of(rank, timeout_sec=1)  # an equal layout, and the broken one is not destroyed yet
    assert fresh.comm != broken.comm
    received = dispatch(fresh, torch.ones(T, H), everywhere())
    assert (combine(fresh, received.hidden_states, received.routing, num_tokens=T) == 2).all()
    broken.destroy()
    fresh.destroy()


def test_a_broken_window_is_not_shared() -> None:
    with RankPool(2) as pool:
        pool.run(run_broken_window)


def test_the_first_error_of_a_local_group_is_the_one_that_is_raised() -> None:
    params = MoEEpCommParams(4, 2, T, H, torch.float32)
    groups = create_local_group(2, params, backend_config("cpu", timeout_sec=2))

    def one_rank(rank: int) -> None:
        if rank == 1:
            raise KeyError("the cause")
        dispatch(groups[rank], torch.ones(T, H), everywhere())

    with pytest.raises(KeyError, match="the cause"):
        run_local_group(2, one_rank)
    for group in groups:
        group.destroy()


def test_windows_of_processes_killed_while_connecting_are_removed() -> None:
    """A window without a lock on it, older than some seconds, is nobody's."""
    orphan = Path("/dev/shm/moe_ep_0_0_orphan")
    held = Path("/dev/shm/moe_ep_0_0_held")
    import fcntl

    for path in (orphan, held):
        path.write_bytes(b"x")
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        deadline = time.monotonic() + 30
        while orphan.exists() and time.monotonic() < deadline:
            time.sleep(1)
            create_communication(BootstrapConfig(1, 0), MoEEpCommParams(1, 1, 1, 1), "shm_one_sided").destroy()
        assert not orphan.exists() and held.exists()
    held.unlink()


def test_wrongly_typed_arguments_are_named() -> None:
    for options, name in (({"dtype": "bf16"}, "dtype"), ({"invalid_expert_id": "x"}, "invalid_expert_id")):
        with pytest.raises(TypeError, match=f"MoEEpCommParams.{name}: expected"):
            MoEEpCommParams(4, 2, T, H, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="invalid_expert_id: expected a 32-bit value"):
        MoEEpCommParams(4, 2, T, H, invalid_expert_id=2**40)
    with pytest.raises(TypeError, match="config: expected a ShmOneSidedConfig or None"):
        torch_moe_ep.ShmOneSidedAlltoAll(BootstrapConfig(1, 0), MoEEpCommParams(4, 2, T, H), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend: expected one of"):
        create_local_group(2, MoEEpCommParams(4, 2, T, H), "nope")
    with pytest.raises(ValueError, match="ep_size: expected at least 1, got 0"):
        create_local_group(0, MoEEpCommParams(4, 2, T, H))
    assert _C.names() == [] or all(isinstance(name, str) for name in _C.names())
