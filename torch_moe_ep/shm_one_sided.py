"""Dispatch and combine between processes of one host, over POSIX shared memory: the CPU column of the ops."""

from __future__ import annotations

import torch

from torch_moe_ep.bootstrap import BootstrapConfig
from torch_moe_ep.communication import register_communication
from torch_moe_ep.config import ShmOneSidedConfig, check_config
from torch_moe_ep.one_sided import OneSidedAlltoAll
from torch_moe_ep.params import MoEEpCommParams


@register_communication("shm_one_sided")
class ShmOneSidedAlltoAll(OneSidedAlltoAll):
    """The interface of NVLinkOneSidedAlltoAll for CPU tensors; the same protocol and the same bits.

    Args:
        bootstrap, params: the group and its sizes.
        config: a :class:`ShmOneSidedConfig`; None is its defaults.
        namespace: a name other than "" asks for windows of its own instead of those of an equal layout.
        low_precision_scales: with ``use_low_precision_combine``, whether blocks of 128 elements carry a float32 scale;
            False is the plain cast to e4m3, which saturates at 448. Gradients of a dispatch travel the same way.
    """

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: ShmOneSidedConfig | None = None,
        *,
        namespace: str = "",
        low_precision_scales: bool = True,
        _name_suffix: str = "",
    ) -> None:
        config = check_config(ShmOneSidedConfig, config)
        super().__init__(bootstrap, params, config, torch.device("cpu"), namespace, _name_suffix, low_precision_scales)

    @classmethod
    def is_platform_supported(cls) -> bool:
        return True
