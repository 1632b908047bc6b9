"""Dispatch and combine between the GPUs of one NVLink domain."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torch_moe_ep import _C
from torch_moe_ep.bootstrap import BootstrapConfig, choose_comm_backend, common_blocks, device_share, gather
from torch_moe_ep.communication import register_communication
from torch_moe_ep.config import NVLinkOneSidedConfig, check_config
from torch_moe_ep.one_sided import OneSidedAlltoAll, logger
from torch_moe_ep.params import MoEEpCommParams
from torch_moe_ep.payload import ceil_div

LAMPORT_REGION_BYTES = 64 * 2**20
LAMPORT_MOST_TOKENS = 512
MEMORY_KINDS = ("fabric", "posix_fd", "cuda_ipc")
"""Tried in this order: what a whole NVLink domain can map, what one host can, and what works where neither does."""


@register_communication("nvlink_one_sided")
class NVLinkOneSidedAlltoAll(OneSidedAlltoAll):
    """Rank-major dispatch and combine with one-sided put and get over NVLink.

    Args:
        bootstrap, params: the group and its sizes.
        config: a :class:`NVLinkOneSidedConfig`; None is its defaults.
        namespace: a name other than "" asks for windows of its own instead of those of an equal layout.
        low_precision_scales: with ``use_low_precision_combine``, whether blocks of 128 elements carry a float32 scale;
            False is the plain cast to e4m3, which saturates at 448. Gradients of a dispatch travel the same way.
        num_sms: SMs the kernels of this rank may fill; None is all of them, or, where ranks share a device, its part of
            three eighths of it, so that other kernels find room beside kernels that wait. All blocks of all ranks of a
            device must be resident at once, or they wait for each other forever.

    ``_emulate_cft`` is for tests: counted writes by ordinary stores and a system-scope add, on any GPU, in any windows.

    Raises:
        RuntimeError: :meth:`is_platform_supported` is False; the text says why.
    """

    supports_cuda_graph = True

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: NVLinkOneSidedConfig | None = None,
        *,
        namespace: str = "",
        low_precision_scales: bool = True,
        num_sms: int | None = None,
        _name_suffix: str = "",
        _emulate_cft: bool = False,
    ) -> None:
        config = check_config(NVLinkOneSidedConfig, config)
        if num_sms is not None and num_sms < 1:
            raise ValueError(f"num_sms: expected at least 1, got {num_sms}")
        index = bootstrap.device
        if index is None:
            index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self.require_platform()
        exchange, _ = choose_comm_backend(bootstrap, config.comm_backend)
        mine = refusals(config, bootstrap.world_size, params, index, _emulate_cft)
        votes = gather(
            exchange, bootstrap.rank, bootstrap.world_size,
            (
                mine,
                config.lamport_max_tokens,
                device_share(torch.device("cuda", index), num_sms),
                None if mine["cft"] else reach_of_counted_writes(index),
            ),
        )
        for rank, (_, limit, _, _) in enumerate(votes):
            if limit != config.lamport_max_tokens:
                raise ValueError(
                    f"lamport_max_tokens: rank {bootstrap.rank} has {config.lamport_max_tokens}, rank {rank} has "
                    f"{limit}; it must be the same on every rank"
                )
        self.transport_refusals: dict[str, list[str]] = {
            transport: [f"rank {r}: {vote[transport]}" for r, (vote, _, _, _) in enumerate(votes) if vote[transport]]
            for transport in ("lamport", "cft")
        }
        if not self.transport_refusals["cft"] and not _emulate_cft:
            self.transport_refusals["cft"] = counted_refusals([reach for _, _, _, reach in votes])
        blocks = common_blocks([share for _, _, share, _ in votes])
        limit = config.lamport_max_tokens or default_lamport_max_tokens(params, bootstrap.world_size, blocks)
        capacity = params.max_tokens_per_rank
        # With cft=True every step takes counted writes, else those up to the two limits.
        counted = {
            op: capacity if config.cft else min(most, capacity)
            for op, most in (
                ("dispatch", config.cft_max_tokens_for_dispatch), ("combine", config.cft_max_tokens_for_combine)
            )
        }
        if self.transport_refusals["cft"] or not any(counted.values()):
            counted = dict.fromkeys(counted, 0)
        super().__init__(
            bootstrap,
            params,
            config,
            torch.device("cuda", index),
            namespace,
            _name_suffix,
            low_precision_scales,
            memory=MEMORY_KINDS,
            pdl=config.enable_pdl is not False,
            num_sms=num_sms,
            lamport_max_tokens=0 if self.transport_refusals["lamport"] else min(limit, capacity),
            counted="" if not any(counted.values()) else "emulated" if _emulate_cft else "fabric",
            counted_max_tokens_for_dispatch=counted["dispatch"],
            counted_max_tokens_for_combine=counted["combine"],
        )
        described = self.describe()
        if not self.transport_refusals["cft"] and not described["counted"]:
            self.transport_refusals["cft"] = [
                f"windows are {described['memory']} and without endpoints; counted writes need fabric windows with them"
                if any(counted.values())
                else "cft_max_tokens_for_dispatch and cft_max_tokens_for_combine are 0"
            ]
        if self.ep_rank == 0:
            state = {
                "lamport": f"on for steps of up to {described['lamport_max_tokens']} tokens per rank, "
                f"{described['lamport_bytes'] / 2**20:.1f} MiB of regions per rank",
                "cft": f"on for dispatches of up to {described['counted_max_tokens_for_dispatch']} tokens per rank and "
                f"combines of up to {described['counted_max_tokens_for_combine']}, "
                f"{described['counted_bytes'] / 2**20:.1f} MiB of regions per rank",
            }
            for transport, reasons in self.transport_refusals.items():
                asked = getattr(config, transport) is True
                logger.log(
                    logging.WARNING if reasons and asked else logging.INFO,
                    "%s: %s is %s", self.comm, transport, f"off ({reasons[0]})" if reasons else state[transport],
                )

    @classmethod
    def is_platform_supported(cls) -> bool:
        return cls.unsupported_reason() is None

    @classmethod
    def unsupported_reason(cls) -> str | None:
        if not _C.has_cuda:
            return "torch_moe_ep was built without its CUDA column; install nvcc and build again, or use shm_one_sided"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device; use shm_one_sided for CPU tensors"
        capability = torch.cuda.get_device_capability()
        if capability < (9, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 9.0"
        return None

    @property
    def lamport_max_tokens(self) -> int:
        """The largest step (R) that the Lamport transport takes; 0 where it is off."""
        return self.describe()["lamport_max_tokens"]

    @property
    def lamport_enabled(self) -> bool:
        """Whether the Lamport transport takes steps of this instance: every rank must be able to."""
        return not self.transport_refusals["lamport"]

    @property
    def cft_enabled(self) -> bool:
        """Whether counted writes take steps of this instance: every rank must be able to."""
        return not self.transport_refusals["cft"]


def default_lamport_max_tokens(params: MoEEpCommParams, ep_size: int, blocks: int) -> int:
    """The largest R that the Lamport transport takes by default: 1 to 512 tokens, and at most C.

    One wave: each of the W*R rows that a rank may receive is cut into groups of 1536 bytes, a warp takes a group, and
    the 8 warps of each of ``blocks`` blocks take one each. In a second wave a warp begins to wait only when its first
    row has come, and the fence transport is faster (measured: benchmarks/README.md). The regions stay within 64 MiB.
    """
    vectors = 128 * ceil_div(ceil_div(params.dispatch_bytes_per_token, 16), 96)  # csrc/transport/lamport.h
    wave = 8 * blocks // (ep_size * max(1, vectors // 128))
    partials = min(params.top_k, ep_size) * params.hidden_size * max(2, params.token_dtype.itemsize) * 4 // 3
    region_bytes_of_token = 2 * (16 * vectors * ep_size + partials)  # two sets
    most = min(wave, LAMPORT_REGION_BYTES // region_bytes_of_token, LAMPORT_MOST_TOKENS, params.max_tokens_per_rank)
    return max(1, most)


def refusals(
    config: NVLinkOneSidedConfig, ep_size: int, params: MoEEpCommParams, device: int, emulate_cft: bool = False
) -> dict[str, str]:
    """Why this rank does not take part in a transport, by transport; "" where it does. What a rank votes with."""
    choice_bytes = params.top_k * (4 + max(4, params.token_dtype.itemsize))
    if config.lamport is False or config.lamport is None and config.cft is True:
        lamport = "lamport=False" if config.lamport is False else "cft=True"
    elif ep_size > 64:
        lamport = f"{ep_size} ranks are more than 64"
    elif ep_size == 1:
        lamport = "a lone rank needs no transport"
    elif config.use_low_precision_combine:
        lamport = "use_low_precision_combine=True"
    elif choice_bytes > 384:
        lamport = f"ids and weights of a token take {choice_bytes} bytes, more than 384"
    else:
        lamport = ""
    if config.cft is False:
        cft = "cft=False"
    elif ep_size == 1:
        cft = "a lone rank needs no transport"
    else:
        cft = "" if emulate_cft else _C.counted_probe(device)["reason"]
    return {"lamport": lamport, "cft": cft}


class Reach(NamedTuple):
    """What tells whether counted writes reach one rank from another."""

    clique: int  # of devices that reach each other
    owner_access: bool  # whether the device reaches its own windows
    device: str  # what identifies it among all hosts
    process: str  # likewise


_process = str(uuid.uuid4())


def reach_of_counted_writes(device: int) -> Reach:
    """This rank's; meaningful where its :func:`refusals` have none for ``cft``."""
    found = _C.counted_probe(device)
    # A forked process has the same token and another id.
    identity = str(torch.cuda.get_device_properties(device).uuid)
    return Reach(found["clique"], found["owner_access"], identity, f"{_process}/{os.getpid()}")


def counted_refusals(ranks: Sequence[Reach]) -> list[str]:
    """Why counted writes do not reach every rank from every rank, a sentence for each rank that is to blame."""
    refusals = []
    for r, mine in enumerate(ranks):
        beside = next((s for s in range(len(ranks)) if s != r and ranks[s].process == mine.process), None)
        sharing = next((s for s in range(len(ranks)) if s != r and ranks[s].device == mine.device), None)
        if mine.clique != ranks[0].clique:
            refusals.append(f"rank {r}: clique {mine.clique} of logical endpoints, rank 0 is in {ranks[0].clique}")
        elif beside is not None:
            refusals.append(f"rank {r}: one process with rank {beside}, and a process has one window with an endpoint")
        elif sharing is not None and not mine.owner_access:
            refusals.append(f"rank {r}: one device with rank {sharing}, and it does not reach its own endpoints")
    return refusals
