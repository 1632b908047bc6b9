"""Every case of cases.py against reference.py, bit for bit, between processes and between threads of one process."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from cases import (
    BY_NAME,
    CASES,
    TIMEOUT_SEC,
    Step,
    backend_config,
    make_group,
    place,
    private_options,
    roomy_group,
)
from ranks import Rank, RankError, RankPool

from torch_moe_ep import create_local_group, run_local_group

SIZES = [1, 2, 3, 4, 8]
NAMES = [case.name for case in CASES]


def run_case(rank: Rank, name: str, backend: str) -> None:
    case, w = BY_NAME[name], rank.world_size
    group = make_group(case, w, rank.rank, rank.device, backend=backend)
    try:
        for seed in range(2):  # the second finds what the first left in the windows
            step = Step(case, w, rank.rank, seed, rank.device)
            step.dispatch(group)
            step.combine(group)
            step.combine(group, into=torch.empty(step.expected_out.shape, dtype=step.expected_out.dtype,
                                                 device=rank.device))
    finally:
        group.destroy()


def run_or_be_refused(pool: RankPool, run_case: Callable[..., None], name: str, backend: str) -> None:
    """A case that masks ranks is none for a collective."""
    if backend == "torch_distributed" and BY_NAME[name].masked:
        with pytest.raises(RankError, match="ValueError: dispatch: active_rank_mask: expected None, for a collective"):
            pool.run(run_case, name, backend)
    else:
        pool.run(run_case, name, backend)


@pytest.mark.parametrize("ep_size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_case(ranks: Callable[[int], RankPool], name: str, ep_size: int, backend: str) -> None:
    run_or_be_refused(ranks(ep_size), run_case, name, backend)


def run_all_cases(rank: Rank, seed: int, backend: str) -> None:
    group = roomy_group(rank.world_size, rank.rank, rank.device, backend=backend)
    try:
        names = [name for name in NAMES if backend == "one_sided" or not BY_NAME[name].masked] * 2
        random.Random(seed).shuffle(names)
        for i, name in enumerate(names):
            step = Step(BY_NAME[name], rank.world_size, rank.rank, seed + i, rank.device)
            step.dispatch(group)
            step.combine(group)
    finally:
        group.destroy()


@pytest.mark.parametrize("ep_size", SIZES)
def test_results_never_depend_on_what_earlier_steps_left(
    ranks: Callable[[int], RankPool], ep_size: int, backend: str
) -> None:
    ranks(ep_size).run(run_all_cases, 7, backend)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize(
    "name", ["plain", "dirty_ids_int64", "order_of_sums", "bytes_with_odd_scales", "eplb", "masked_rank", "sliced"]
)
def test_local_group(device: str, name: str, ep_size: int) -> None:
    case = BY_NAME[name]
    groups = create_local_group(
        ep_size, case.params(ep_size), backend_config(device, **case.options()), **private_options(device)
    )

    def one_rank(rank: int) -> None:
        for seed in range(2):
            step = Step(case, ep_size, rank, seed, device)
            step.dispatch(groups[rank])
            step.combine(groups[rank])

    try:
        run_local_group(ep_size, one_rank)
    finally:
        for group in groups:
            group.destroy()


def run_into_strided_output(rank: Rank, backend: str) -> None:
    case = BY_NAME["order_of_sums"]
    group = make_group(case, rank.world_size, rank.rank, rank.device, backend=backend)
    try:
        for strides in ("transposed", "sliced"):
            step = Step(case, rank.world_size, rank.rank, 3, rank.device)
            step.dispatch(group)
            into = place(torch.zeros_like(step.expected_out), rank.device, strides)
            assert into is not None and not into.is_contiguous()
            step.combine(group, into=into)
    finally:
        group.destroy()


def test_combine_writes_any_strides(ranks: Callable[[int], RankPool], backend: str) -> None:
    ranks(3).run(run_into_strided_output, backend)


def test_the_cases_that_must_be_there() -> None:
    """A case list can lose what it is for without a single failure; this is what it is for."""
    assert {case.top_k for case in CASES} >= {1, 2, 22, 32}
    assert {case.strides for case in CASES} == {"contiguous", "transposed", "sliced", "expanded"}
    assert {case.dtype for case in CASES} >= {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8}
    assert {case.id_dtype for case in CASES} == {torch.int32, torch.int64}
    assert any(case.num_experts < max(SIZES) for case in CASES) and any(case.num_experts % 4 for case in CASES)
    wide = [Step(BY_NAME["dirty_ids_int64"], 2, 0, seed).inputs.topk_ids for seed in range(9)]
    assert (torch.cat(wide) == 2**32 + 1).any()
    assert all(case.options()["timeout_sec"] == TIMEOUT_SEC for case in CASES)
