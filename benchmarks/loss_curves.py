"""Training a small decoder with MoEEpLayer, compiled, on several ranks against one process that knows nothing of it.

The decoder (causal attention and Mixture-of-Experts layers) learns sequences of a random Markov chain. Every way starts
from the same weights and sees the same batches; W ranks have 1/W of each batch. Ranks sum the gradients of what is
replicated; the gradients of experts need no communication beyond that of the layer. The one process runs eagerly, with
every expert in plain torch on every token. A run fails if a loss strays from that of the one process by more than
``TOLERANCE``, relative, at any step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.harness import Results, parser, run_ranks
from torch_moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpLayer,
    MoEEpTensors,
    MoEWeightPack,
    QuantFormat,
    ShmOneSidedConfig,
    create_communication,
)

VOCABULARY, LENGTH, BATCH = 64, 32, 16  # a batch of all ranks has BATCH sequences of LENGTH tokens
LAYERS, HIDDEN, INNER, EXPERTS, TOP_K, HEADS = 2, 64, 96, 10, 2, 4  # EXPERTS divide neither by 4 nor by 3
DTYPES = {"float64": torch.float64, "float32": torch.float32}
# float64 shows that the computation is the same one. In float32 sums in another order differ in the last bits, and
# training multiplies what differs. A quantized dispatch is another computation.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "MXFP8": 2e-2}


class PlainExperts(nn.Module):
    """All experts on all tokens."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        super().__init__()
        self.w13, self.w2 = nn.Parameter(w13), nn.Parameter(w2)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, gate = torch.einsum("th,efh->etf", x, self.w13).chunk(2, dim=2)
        each = torch.einsum("etf,ehf->eth", nn.functional.silu(gate) * up, self.w2)
        share = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, ids, weights)
        return torch.einsum("te,eth->th", share, each)


class SpreadExperts(nn.Module):
    """This rank's share of them in a MoEEpLayer."""

    def __init__(self, group: MoEEpCommunication, w13: torch.Tensor, w2: torch.Tensor) -> None:
        super().__init__()
        mine = slice(group.local_experts.start, group.local_experts.stop)
        pack = MoEWeightPack(nn.Parameter(w13[mine].clone()), nn.Parameter(w2[mine].clone()))
        self.layer = MoEEpLayer(weights=pack, group=group)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.layer(MoEEpTensors(x, ids, weights))


class Block(nn.Module):
    def __init__(self, weight: Callable[..., torch.Tensor], make_experts: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Parameter(weight(3 * HIDDEN, HIDDEN)), nn.Parameter(weight(HIDDEN, HIDDEN))
        self.router = nn.Parameter(weight(EXPERTS, HIDDEN))
        self.experts = make_experts(weight(EXPERTS, 2 * INNER, HIDDEN), weight(EXPERTS, HIDDEN, INNER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (norm(x) @ self.qkv.t()).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + seen.transpose(1, 2).flatten(2) @ self.out.t()
        tokens = norm(x).flatten(0, 1)
        weights, ids = (tokens @ self.router.t()).softmax(1).topk(TOP_K, dim=1)
        return x + self.experts(tokens, ids, weights / weights.sum(1, keepdim=True)).view_as(x)


class Decoder(nn.Module):
    def __init__(self, dtype: torch.dtype, make_experts: Callable[..., nn.Module]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5).to(dtype)

        self.embedding = nn.Parameter(weight(VOCABULARY, HIDDEN) * HIDDEN**0.5)
        self.blocks = nn.Sequential(*[Block(weight, make_experts) for _ in range(LAYERS)])
        self.head = nn.Parameter(weight(VOCABULARY, HIDDEN))

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """The sum over predictions of their cross entropy, over all predictions of the batch of all ranks."""
        logits = norm(self.blocks(self.embedding[sequences[:, :-1]])) @ self.head.t()
        total = nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten(), reduction="sum")
        return total / (BATCH * LENGTH)


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def batch(step: int) -> torch.Tensor:
    """``[BATCH, LENGTH + 1]`` of a chain in which every symbol has three successors, mostly the first of them."""
    successors = torch.randint(VOCABULARY, (VOCABULARY, 3), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1000 + step)
    symbols = [torch.randint(VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        choice = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]).expand(BATCH, 3), 1, generator=generator)[:, 0]
        symbols.append(successors[symbols[-1], choice])
    return torch.stack(symbols, 1)


def train(rank: int, world_size: int, dtype: torch.dtype, steps: int, way: str) -> dict[str, Any]:
    """The loss of each step, summed over the ranks. ``way`` is "plain", "layer" or the name of a dispatch format."""
    group = None
    if way == "plain":
        model = Decoder(dtype, PlainExperts)
        run: Callable[..., torch.Tensor] = model
    else:
        quant_format = None if way == "layer" else QuantFormat[way]
        params = MoEEpCommParams(
            EXPERTS, TOP_K, BATCH * LENGTH // world_size, HIDDEN, dtype=dtype, dispatch_format=quant_format
        )
        config = ShmOneSidedConfig(extra_payload_bytes_per_token=HIDDEN * dtype.itemsize)
        group = create_communication(BootstrapConfig(world_size, rank), params, config)
        model = Decoder(dtype, lambda w13, w2: SpreadExperts(group, w13, w2))
        run = torch.compile(model, fullgraph=True, dynamic=False)
    counters.clear()
    replicated = [p for name, p in model.named_parameters() if ".experts." not in name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = run(batch(step).chunk(world_size)[rank])
        loss.backward()
        loss = loss.detach()
        for tensor in [loss, *(p.grad for p in replicated)]:
            dist.all_reduce(tensor)
        optimizer.step()
        losses.append(loss.item())
    if group is not None:
        dist.barrier()
        group.destroy()
    return {"losses": losses, "graphs": counters["stats"]["unique_graphs"]}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options.add_argument("--formats", nargs="*", choices=["MXFP8"], default=["MXFP8"], help="dispatched in, in float32")
    a = options.parse_args()
    results, strayed = Results("loss_curves", a.out), []
    for dtype in a.dtypes:
        ways = [("plain", 1), *(("layer", w) for w in a.ranks)]
        if dtype == "float32":
            ways += [(name, max(a.ranks)) for name in a.formats]
        for way, world_size in ways:
            trained = run_ranks(train, world_size, world_size, DTYPES[dtype], a.steps, way)[0]
            if way == "plain":
                expected = trained["losses"]
            errors = [abs(loss / aim - 1) for loss, aim in zip(trained["losses"], expected, strict=True)]
            allowed = TOLERANCE[dtype if way in ("plain", "layer") else way]
            results.emit(
                dtype=dtype, way=way, ranks=world_size, steps=a.steps, compiled=way != "plain",
                graphs=trained["graphs"], first_loss=trained["losses"][0], last_loss=trained["losses"][-1],
                max_relative_error=max(errors), allowed=allowed, losses=trained["losses"],
            )
            if max(errors) > allowed:
                strayed.append(f"{way}, {dtype}, {world_size} ranks: {max(errors):.1e}, allowed {allowed:.0e}")
    if strayed:
        raise SystemExit("losses strayed: " + "; ".join(strayed))


if __name__ == "__main__":
    main()
