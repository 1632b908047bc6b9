"""Fixtures: ``device`` (cpu always, cuda where present) and ``ranks`` (pools of rank processes, one per world size).

On a GPU the steps of most tests take the transport that ``--transport`` names: ``lamport`` unless told otherwise,
``fence`` or ``counted`` (emulated); run the tests with each. test_cuda.py, test_lamport_cuda.py and
test_counted_cuda.py test one alone, and test_nccl.py none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from ranks import RankPool

import torch_moe_ep

DEVICES = ["cpu"]
if torch_moe_ep.NVLinkOneSidedAlltoAll.is_platform_supported():
    DEVICES.append("cuda")
collect_ignore = []
if "cuda" not in DEVICES:
    collect_ignore = ["test_cuda.py", "test_lamport_cuda.py", "test_counted_cuda.py", "test_nccl.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--transport", choices=("lamport", "fence", "counted"), default="lamport",
                     help="of the steps that can take it, on a GPU; counted writes are emulated")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["MOE_EP_TEST_TRANSPORT"] = config.getoption("--transport")  # the pools' processes inherit it


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["one_sided", "torch_distributed"])
def backend(request: pytest.FixtureRequest) -> str:
    """For `make_group` and `open_group`: the one-sided backend of the device, or the one over collectives (of the
    pools' gloo groups, which move CUDA tensors too; test_nccl.py has groups of NCCL)."""
    return request.param


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[tuple[int, str], RankPool]]:
    pools: dict[tuple[int, str], RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(_pools: dict[tuple[int, str], RankPool], device: str) -> Callable[[int], RankPool]:
    """``ranks(W)``: the pool of W processes on the test's device; a pool that lost a rank is replaced."""

    def get(world_size: int) -> RankPool:
        key = (world_size, device)
        if key not in _pools or not _pools[key].alive:
            _pools[key] = RankPool(world_size, device)
        return _pools[key]

    return get
