"""A small Mixture-of-Experts model for the tests of compilation, export and gradients.

Its layer is itself what ``torch_moe_ep.dispatch`` takes as a group: it holds ``order`` as a non-persistent buffer, so
that it can be exported, and the ids of its experts as a tensor, so that all ranks compile the same code.
"""

from __future__ import annotations

import torch
from cases import bootstrap_of
from torch import nn

import torch_moe_ep
from torch_moe_ep import MoEEpCommParams, MoEEpCommunication

EXPERTS, TOP_K, CAPACITY, HIDDEN, INNER = 6, 2, 64, 16, 8
PATIENCE = 300
"""Seconds for what compiles C++: far beyond what it takes, also where other work has the cores."""


def open_group(
    rank: int,
    world_size: int,
    device: str,
    *,
    namespace: str = "",
    dtype: torch.dtype = torch.float32,
    backend: str = "one_sided",
    **config: object,
) -> MoEEpCommunication:
    """A communicator with the sizes above. Collective. ``backend`` "one_sided" is that of the device."""
    params = MoEEpCommParams(EXPERTS, TOP_K, CAPACITY, HIDDEN, dtype=dtype)
    configs = {
        "cpu": torch_moe_ep.ShmOneSidedConfig,
        "cuda": torch_moe_ep.NVLinkOneSidedConfig,
        "torch_distributed": torch_moe_ep.TorchDistributedConfig,
    }
    make = configs[device if backend == "one_sided" else backend]
    bootstrap = bootstrap_of(world_size, rank, device)
    return torch_moe_ep.create_communication(bootstrap, params, make(**config), namespace=namespace)


def full_weights(layer: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters of all experts of a layer, the same on every rank."""
    generator = torch.Generator().manual_seed(layer)
    shapes = {"router": (HIDDEN, EXPERTS), "up": (EXPERTS, HIDDEN, INNER), "down": (EXPERTS, INNER, HIDDEN)}
    return {name: torch.randn(shape, generator=generator).to(dtype) / 4 for name, shape in shapes.items()}


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, local: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """``[N, H]`` rows through the experts ``local`` that their ids name, weighted and summed. The payload of a row that
    holds no token is unspecified, so it is replaced before anything is computed from it."""
    chosen = ids.unsqueeze(1) == local.unsqueeze(1)  # [N, L, K]
    gate = torch.where(chosen, weights.unsqueeze(1), 0).sum(2)  # [N, L]
    x = torch.where(chosen.any(2).any(1, keepdim=True), x, 0)
    inner = nn.functional.silu(torch.einsum("nh,lhf->lnf", x, up))
    return torch.einsum("lnf,lfh,nl->nh", inner, down, gate)


def route(x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = (x @ router).softmax(1).topk(TOP_K, dim=1)
    return ids, weights


class Layer(nn.Module):
    """x + experts(x), through the plain functions."""

    def __init__(self, group: MoEEpCommunication, number: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.comm, self.ep_size, self.params, self.timeout_sec = group.comm, group.ep_size, group.params, PATIENCE
        self.register_buffer("order", group.order, persistent=False)
        local = torch.tensor(list(group.local_experts), dtype=torch.int32, device=group.order.device)
        self.register_buffer("local", local, persistent=False)
        weights = {name: w.to(local.device) for name, w in full_weights(number, dtype).items()}
        self.router = nn.Parameter(weights["router"])
        self.up = nn.Parameter(weights["up"][local.long()].clone())
        self.down = nn.Parameter(weights["down"][local.long()].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = route(x, self.router)
        got = torch_moe_ep.dispatch(self, x, ids, weights)
        y = run_experts(got.hidden_states, got.topk_ids, got.topk_weights, self.local, self.up, self.down)
        return x + torch_moe_ep.combine(self, y, got.routing, num_tokens=x.shape[0])


class ClassLayer(Layer):
    """The same through MoEEpCommunication.dispatch and combine."""

    def __init__(self, group: MoEEpCommunication, number: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(group, number, dtype)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = route(x, self.router)
        got = self.group.dispatch(x, ids, weights)
        y = run_experts(got.hidden_states, got.topk_ids, got.topk_weights, self.local, self.up, self.down)
        return x + self.group.combine(y)


def make_model(
    groups: list[MoEEpCommunication], dtype: torch.dtype = torch.float32, layer: type[Layer] = Layer
) -> nn.Sequential:
    """One layer per entry of ``groups``."""
    return nn.Sequential(*[layer(group, number, dtype) for number, group in enumerate(groups)])


def make_reference(layers: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
    """The model in one process, all experts local, without the ops."""

    class ReferenceLayer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            for name, weight in full_weights(number, dtype).items():
                setattr(self, name, nn.Parameter(weight.to(device)))
            self.register_buffer("local", torch.arange(EXPERTS, dtype=torch.int32, device=device))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ids, weights = route(x, self.router)
            return x + run_experts(x, ids, weights, self.local, self.up, self.down)

    return nn.Sequential(*[ReferenceLayer(number) for number in range(layers)])


def tokens(
    count: int, rank: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """``[count, H]`` inputs of a rank."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 + rank)).to(device, dtype)
