"""Expert-parallel dispatch and combine for PyTorch, as ops that torch.compile can trace.

``torch.ops.moe_ep.dispatch`` puts each token on every rank that owns one of its experts, ``torch.ops.moe_ep.combine``
brings the experts' partial outputs home and sums them. Importing this package registers both.
"""

from pathlib import Path

import torch

OP_LIBRARY = str(Path(__file__).with_name("libtorch_moe_ep.so"))
"""Path of the op library: free of Python, also for ``torch.ops.load_library`` and C++ programs."""

torch.ops.load_library(OP_LIBRARY)

from torch_moe_ep.bootstrap import BootstrapConfig, StoreCommBackend, TorchDistributedCommBackend  # noqa: E402
from torch_moe_ep.communication import (  # noqa: E402
    MoEEpCommunication,
    MoEEpDispatchResult,
    available_communication_backends,
    create_communication,
    is_communication_backend,
    register_communication,
)
from torch_moe_ep.config import NVLinkOneSidedConfig, ShmOneSidedConfig, TorchDistributedConfig  # noqa: E402
from torch_moe_ep.experts import ExpertMajor, GroupedSwiGLU, expert_major, sum_slots, take_rows  # noqa: E402
from torch_moe_ep.functional import (  # noqa: E402
    Dispatched,
    PendingCombine,
    PendingDispatch,
    combine,
    combine_start,
    combine_wait,
    dispatch,
    dispatch_start,
    dispatch_wait,
)
from torch_moe_ep.layer import (  # noqa: E402
    GroupedSwiGLUConfig,
    MoEEpLayer,
    MoEEpTensors,
    MoEWeightPack,
    SplitConfig,
)
from torch_moe_ep.local_group import create_local_group, run_local_group  # noqa: E402
from torch_moe_ep.nvlink_one_sided import NVLinkOneSidedAlltoAll  # noqa: E402
from torch_moe_ep.params import MoEEpCommParams  # noqa: E402
from torch_moe_ep.payload import QuantFormat, dequantize, global_scale_of, quantize  # noqa: E402
from torch_moe_ep.shm_one_sided import ShmOneSidedAlltoAll  # noqa: E402
from torch_moe_ep.torch_distributed import TorchDistributedAlltoAll  # noqa: E402
from torch_moe_ep.version import __version__  # noqa: E402

__all__ = [
    "OP_LIBRARY",
    "BootstrapConfig",
    "Dispatched",
    "ExpertMajor",
    "GroupedSwiGLU",
    "GroupedSwiGLUConfig",
    "MoEEpCommParams",
    "MoEEpCommunication",
    "MoEEpDispatchResult",
    "MoEEpLayer",
    "MoEEpTensors",
    "MoEWeightPack",
    "NVLinkOneSidedAlltoAll",
    "NVLinkOneSidedConfig",
    "PendingCombine",
    "PendingDispatch",
    "QuantFormat",
    "ShmOneSidedAlltoAll",
    "ShmOneSidedConfig",
    "SplitConfig",
    "StoreCommBackend",
    "TorchDistributedAlltoAll",
    "TorchDistributedCommBackend",
    "TorchDistributedConfig",
    "__version__",
    "available_communication_backends",
    "combine",
    "combine_start",
    "combine_wait",
    "create_communication",
    "create_local_group",
    "dequantize",
    "dispatch",
    "dispatch_start",
    "dispatch_wait",
    "expert_major",
    "global_scale_of",
    "is_communication_backend",
    "quantize",
    "register_communication",
    "run_local_group",
    "sum_slots",
    "take_rows",
]
