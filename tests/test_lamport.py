"""The Lamport transport as far as it needs no GPU: the search of its protocol, its default limit, and the vote."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lamport_model import PLANTED, search

from torch_moe_ep import _C, MoEEpCommParams, NVLinkOneSidedConfig, QuantFormat
from torch_moe_ep.bootstrap import common_blocks
from torch_moe_ep.nvlink_one_sided import LAMPORT_REGION_BYTES, default_lamport_max_tokens, refusals


@pytest.mark.parametrize("name", PLANTED)
def test_search_of_the_protocol(name: str) -> None:
    """Every order of two ranks' steps in four rounds, of three ranks' in two; results/lamport_model.txt has three."""
    found = [search(world, rounds, PLANTED[name])[0] for world, rounds in ((2, 4), (3, 2))]
    if name == "the protocol":
        assert found == [None, None]
    else:
        assert any(found), "the search does not see what was taken out"


PARAMS = MoEEpCommParams(256, 8, 1024, 7168)  # bfloat16: a row is 10 groups


@pytest.mark.parametrize(
    ("ep_size", "blocks", "limit"),
    [(8, 264, 26), (8, 32, 3), (4, 66, 13), (2, 132, 52), (64, 264, 3), (64, 1, 1)],
)
def test_default_limit_is_one_wave(ep_size: int, blocks: int, limit: int) -> None:
    assert default_lamport_max_tokens(PARAMS, ep_size, blocks) == limit
    assert ep_size * limit * 10 <= 8 * blocks or limit == 1


def test_default_limit_keeps_to_the_capacity_and_to_64_mib() -> None:
    small = MoEEpCommParams(256, 8, 5, 7168)
    assert default_lamport_max_tokens(small, 2, 264) == 5
    wide = MoEEpCommParams(8, 8, 4096, 512 * 1024, dtype=torch.float32)
    limit = default_lamport_max_tokens(wide, 2, 10**6)
    row = 2 * 16 * 128 * -(-(512 * 1024 * 4 // 16) // 96) * 2 + 2 * 2 * 512 * 1024 * 4 * 4 // 3
    assert limit == LAMPORT_REGION_BYTES // row > 1
    tiny = MoEEpCommParams(8, 2, 4096, 16, dispatch_format=QuantFormat.NVFP4)
    assert default_lamport_max_tokens(tiny, 2, 10**6) == 512


def test_ranks_that_share_a_device_leave_room() -> None:
    assert common_blocks([("a", 264), ("b", 264)]) == 264
    assert common_blocks([("a", 264)] * 8) == 12
    assert common_blocks([("a", 264), ("a", 264), ("b", 264)]) == 49  # the smallest share counts for all
    assert common_blocks([("a", 3)] * 8) == 1


def vote(monkeypatch: pytest.MonkeyPatch, ep_size: int = 8, params: MoEEpCommParams = PARAMS,
         **options: object) -> SimpleNamespace:
    monkeypatch.setattr(_C, "counted_probe", lambda device: {"reason": ""}, raising=False)
    return SimpleNamespace(**refusals(NVLinkOneSidedConfig(**options), ep_size, params, 0))  # type: ignore[arg-type]


def test_what_a_rank_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vote(monkeypatch).lamport == ""
    assert vote(monkeypatch, lamport=True).lamport == ""
    assert vote(monkeypatch, lamport=False).lamport == "lamport=False"
    assert vote(monkeypatch, cft=True).lamport == "cft=True"
    assert vote(monkeypatch, ep_size=64).lamport == ""
    assert vote(monkeypatch, ep_size=65).lamport == "65 ranks are more than 64"
    assert "lone rank" in vote(monkeypatch, ep_size=1).lamport
    assert vote(monkeypatch, use_low_precision_combine=True).lamport == "use_low_precision_combine=True"
    for dispatch_format in (None, QuantFormat.MXFP8, QuantFormat.DeepSeekFp8, QuantFormat.NVFP4):
        params = MoEEpCommParams(256, 8, 64, 7168, dispatch_format=dispatch_format)
        assert vote(monkeypatch, params=params).lamport == ""
