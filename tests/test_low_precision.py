"""use_low_precision_combine: FP8 partials with a scale per 128 elements, and the plain cast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import backend_config
from ranks import Rank, RankPool

from torch_moe_ep import BootstrapConfig, MoEEpCommParams, combine, create_communication, dispatch

T, K, E = 6, 4, 12


def run_combine(
    rank: Rank, hidden: int, dtype: torch.dtype, magnitude: float, scales: bool, strided: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What combine gives, and the same sum of the unrounded partials in float64."""
    w = rank.world_size
    params = MoEEpCommParams(E, K, T, hidden, dtype=dtype)
    config = backend_config(rank.device, use_low_precision_combine=True, timeout_sec=20)
    group = create_communication(BootstrapConfig(w, rank.rank), params, config, low_precision_scales=scales)
    generators = [torch.Generator().manual_seed(r) for r in range(w)]
    ids = [torch.rand(T, E, generator=g).topk(K, dim=1).indices for g in generators]
    rows = [(torch.randn(w * T, hidden, generator=g) * magnitude).to(dtype) for g in generators]
    x = torch.zeros(T, hidden, dtype=dtype, device=rank.device)
    mine = rows[rank.rank].to(rank.device)
    if strided:
        mine = mine.t().contiguous().t()
    try:
        received = dispatch(group, x, ids[rank.rank].to(rank.device))
        got = combine(group, mine, received.routing, num_tokens=T).cpu()
    finally:
        group.destroy()
    exact = torch.zeros(T, hidden, dtype=torch.float64)
    for t in range(T):
        for target in {int(i) // (E // w) for i in ids[rank.rank][t]}:
            exact[t] += rows[target][rank.rank * T + t].double()
    return got, exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [256, 200, 37, 1])
def test_error_of_normal_data(ranks: Callable[[int], RankPool], hidden: int, dtype: torch.dtype) -> None:
    for got, exact in ranks(3).run(run_combine, hidden, dtype, 1.0, True):
        error = (got.double() - exact).norm() / exact.norm()
        assert 0 < error < 0.04 or hidden == 1, error


@pytest.mark.parametrize("magnitude", [1e4, 1e-4, 1e-8])
def test_large_and_small_activations_survive(ranks: Callable[[int], RankPool], magnitude: float) -> None:
    for got, exact in ranks(2).run(run_combine, 384, torch.bfloat16, magnitude, True):
        assert (got.double() - exact).norm() / exact.norm() < 0.04
    plain = ranks(2).run(run_combine, 384, torch.bfloat16, magnitude, False)
    assert any((got.double() - exact).norm() / exact.norm() > 0.2 for got, exact in plain)


def test_plain_cast_is_torchs(ranks: Callable[[int], RankPool]) -> None:
    """At magnitudes where nothing saturates, one travelled partial is what torch's own cast gives."""
    for got, exact in ranks(2).run(run_combine, 64, torch.float32, 10.0, False):
        halves = exact.float().to(torch.float8_e4m3fn).float()
        assert torch.isfinite(got).all()
        assert (got - exact.float()).abs().max() < 4 * (halves - exact.float()).abs().max() + 4.0


def test_strided_rows(ranks: Callable[[int], RankPool]) -> None:
    straight = ranks(2).run(run_combine, 96, torch.bfloat16, 1.0, True)
    for (got, _), (expected, _) in zip(ranks(2).run(run_combine, 96, torch.bfloat16, 1.0, True, True), straight,
                                       strict=True):
        assert torch.equal(got, expected)


def run_special_values(rank: Rank) -> torch.Tensor:
    hidden = 256
    config = backend_config(rank.device, use_low_precision_combine=True, timeout_sec=20)
    params = MoEEpCommParams(2, 1, 2, hidden, dtype=torch.float32)
    group = create_communication(BootstrapConfig(2, rank.rank), params, config)
    ids = torch.full((2, 1), 1 - rank.rank, device=rank.device)  # everything to the other rank
    try:
        received = dispatch(group, torch.zeros(2, hidden, device=rank.device), ids)
        rows = torch.zeros(4, hidden)
        rows[:, 0], rows[:, 1], rows[:, 2] = float("inf"), float("nan"), 448.0
        rows[:, 128:] = -0.0
        return combine(group, rows.to(rank.device), received.routing, num_tokens=2).cpu()
    finally:
        group.destroy()


def test_infinities_become_nan_and_spoil_nothing_else(ranks: Callable[[int], RankPool]) -> None:
    for got in ranks(2).run(run_special_values):
        assert got[:, :2].isnan().all()
        assert (got[:, 2] == 448).all() and (got[:, 3:] == 0).all()


def run_float64(rank: Rank) -> str:
    config = backend_config(rank.device, use_low_precision_combine=True, timeout_sec=20)
    group = create_communication(
        BootstrapConfig(2, rank.rank), MoEEpCommParams(2, 1, 2, 8, dtype=torch.float64), config
    )
    try:
        received = dispatch(group, torch.zeros(2, 8, dtype=torch.float64, device=rank.device),
                            torch.zeros(2, 1, dtype=torch.int64, device=rank.device))
        with pytest.raises(ValueError, match="expert_output: float64 rows do not travel as FP8") as error:
            combine(group, received.hidden_states, received.routing, num_tokens=2)
        return str(error.value)
    finally:
        group.destroy()


def test_float64_is_refused(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_float64)


def run_window_bytes(rank: Rank) -> int:
    params = MoEEpCommParams(8, 8, 64, 7168)
    sizes = []
    for low_precision in (False, True):
        config = backend_config(rank.device, use_low_precision_combine=low_precision)
        group = create_communication(BootstrapConfig(2, rank.rank), params, config)
        sizes.append(group.describe()["landing_bytes"])
        group.destroy()
    return sizes[0] - sizes[1]


def test_scales_cost_three_percent_of_the_bytes(ranks: Callable[[int], RankPool]) -> None:
    rows = 64 * 2  # C * min(K, W)
    assert ranks(2).run(run_window_bytes) == [rows * (2 * 7168 - (7168 + 4 * 56))] * 2
