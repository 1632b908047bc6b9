"""Gradients: the backward of dispatch is a combine and the other way round, in eager and compiled code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, RankPool
from tiny_model import CAPACITY, HIDDEN, PATIENCE, make_model, make_reference, open_group, route, tokens
from torch import nn
from torch._dynamo.utils import counters
from torch.utils import checkpoint

import torch_moe_ep
from torch_moe_ep import MoEEpCommunication


def differentiable_step(
    group: MoEEpCommunication, ids: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Nonlinear in every input; ``scale`` stands for the parameters of experts."""
    got = torch_moe_ep.dispatch(group, x, ids, weights, tokens_per_rank=8)
    holds_token = (got.topk_ids >= 0).any(1, keepdim=True)
    rows = torch.where(holds_token, got.hidden_states, 0)
    gate = torch.where(holds_token, got.topk_weights, 0).prod(1, keepdim=True)
    return torch_moe_ep.combine(group, (rows * scale).sin() * gate, got.routing, num_tokens=x.shape[0])


def step_inputs(rank: int, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """ids (a token goes nowhere, one to an expert twice), and float64 inputs that want gradients."""
    ids = torch.tensor([[0, 5], [-1, -1], [4, 4], [2, 1]], device=device)
    x = tokens(4, rank, torch.float64, device)[:, :3].contiguous().requires_grad_()
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(device)
    return ids, x, weights.requires_grad_(), torch.full((3,), 0.7, device=device, dtype=torch.float64).requires_grad_()


def test_gradcheck(device: str, backend: str) -> None:
    group = open_group(0, 1, device, dtype=torch.float64, backend=backend)
    ids, *inputs = step_inputs(0, device)
    assert torch.autograd.gradcheck(partial(differentiable_step, group, ids), inputs)
    group.destroy()


def gradients_by_differences(rank: Rank, backend: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The gradient of the sum over all ranks of a function of the outputs, by backward and by central differences.
    Every rank moves the same element of its own input in step; so each also sees the effect of its peers' moves, and
    the sum over ranks of the differences must be the sum over ranks of the gradients."""
    group = open_group(rank.rank, rank.world_size, rank.device.type, dtype=torch.float64, backend=backend)
    ids, *inputs = step_inputs(rank.rank, rank.device)

    def loss() -> torch.Tensor:
        return differentiable_step(group, ids, *inputs).exp().sum()

    loss().backward()
    results, epsilon = [], 1e-6
    for tensor in inputs:
        differences = torch.zeros_like(tensor)
        for i in range(tensor.numel()):
            sides = []
            for step in (epsilon, -epsilon):
                with torch.no_grad():
                    tensor.view(-1)[i] += step
                    sides.append(loss().detach())
                    tensor.view(-1)[i] -= step
            differences.view(-1)[i] = (sides[0] - sides[1]) / (2 * epsilon)
        results.append((tensor.grad.cpu(), differences.cpu()))
    group.destroy()
    return results


def test_gradients_across_ranks_are_those_of_finite_differences(
    ranks: Callable[[int], RankPool], backend: str
) -> None:
    by_rank = ranks(2).run(gradients_by_differences, backend, timeout=PATIENCE)
    for results in zip(*by_rank, strict=True):
        gradient, differences = (sum(tensors) for tensors in zip(*results, strict=True))
        torch.testing.assert_close(gradient, differences, rtol=1e-6, atol=1e-7)


def each_is_the_others_backward(rank: Rank) -> None:
    group = open_group(rank.rank, rank.world_size, rank.device.type)
    count = 0 if rank.rank == 1 else 4
    ids = step_inputs(rank.rank, rank.device)[0][:count]
    generator = torch.Generator().manual_seed(50 + rank.rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(rank.device)

    x, weights = random(count, HIDDEN).requires_grad_(), random(count, 2).requires_grad_()
    rows = torch_moe_ep.dispatch(group, x, ids, weights, tokens_per_rank=8)
    to_rows, to_weights = random(8 * rank.world_size, HIDDEN), random(8 * rank.world_size, 2)
    torch.autograd.backward([rows.hidden_states, rows.topk_weights], [to_rows, to_weights])
    for got, gradient in ((x.grad, to_rows), (weights.grad, to_weights)):
        assert torch.equal(got, torch_moe_ep.combine(group, gradient, rows.routing, num_tokens=count))
    assert x.grad[1:2].eq(0).all()  # the token that goes nowhere

    partials = random(8 * rank.world_size, HIDDEN).requires_grad_()
    out = torch_moe_ep.combine(group, partials, rows.routing, num_tokens=count)
    to_out = random(count, HIDDEN)
    out.backward(to_out)
    dispatched = torch_moe_ep.dispatch(group, to_out, ids, tokens_per_rank=8)
    holds_token = (dispatched.topk_ids >= 0).any(1, keepdim=True)
    assert torch.equal(partials.grad, torch.where(holds_token, dispatched.hidden_states, 0))
    group.destroy()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_backward_of_each_is_the_other_bit_for_bit(ranks: Callable[[int], RankPool], world_size: int) -> None:
    ranks(world_size).run(each_is_the_others_backward)


# --- A model against one process --------------------------------------------------------------------------------------


def run_and_take_gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the mean square, by parameter name, ``x`` among them."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    return {"x": x.grad} | {name: parameter.grad for name, parameter in model.named_parameters()}


def expected_gradients(rank: Rank, layers: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of one process that has the tokens of all ranks; of experts, those that this rank owns. A router is replicated:
    this rank's share of its gradient comes from its own tokens alone."""
    reference = make_reference(layers, dtype, rank.device)
    everything = [count_tokens(r, dtype, rank.device) for r in range(rank.world_size)]
    expected = run_and_take_gradients(reference, torch.cat(everything))
    own = run_and_take_gradients(reference, everything[rank.rank])
    local = torch_moe_ep.MoEEpCommParams(6, 2, CAPACITY, HIDDEN).local_experts(rank.rank, rank.world_size)
    first = sum(len(x) for x in everything[: rank.rank])
    return {
        name: gradient[first : first + len(everything[rank.rank])]
        if name == "x"
        else own[name]
        if name.endswith("router")
        else gradient[local.start : local.stop]
        for name, gradient in expected.items()
    }


def count_tokens(rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return tokens(7 - 3 * rank, rank, dtype, device)


class Checkpointed(nn.Sequential):
    """Every layer under activation checkpointing: plain, or keeping what the ops returned."""

    def __init__(self, layers: nn.Sequential, selective: bool) -> None:
        super().__init__(*layers)
        self.context = partial(checkpoint.create_selective_checkpoint_contexts, keep_ops) if selective else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = {} if self.context is None else {"context_fn": self.context}
        for layer in self:
            x = checkpoint.checkpoint(layer, x, use_reentrant=False, **options)
        return x


def keep_ops(_: object, op: object, *args: object, **kwargs: object) -> checkpoint.CheckpointPolicy:
    ours = op in (torch.ops.moe_ep.dispatch.default, torch.ops.moe_ep.combine.default)
    return checkpoint.CheckpointPolicy.MUST_SAVE if ours else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


FORWARD_ROUNDS, BACKWARD_ROUNDS = 2 * 2, 2 * 3  # of two layers; backward: of combine, of hidden_states, of weights


def train(rank: Rank, checkpointing: str, compiled: bool, backend: str = "one_sided") -> int | None:
    """Compares the gradients; returns the number of rounds, where they are counted, beyond those of a plain forward and
    backward."""
    torch._dynamo.reset()
    group = open_group(rank.rank, rank.world_size, rank.device.type, dtype=torch.float64, backend=backend)
    model: nn.Module = make_model([group, group], torch.float64)
    if checkpointing != "none":
        model = Checkpointed(model, selective=checkpointing == "selective")
    run = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else model
    got = run_and_take_gradients(run, count_tokens(rank.rank, torch.float64, rank.device))
    rounds = group.describe().get("rounds")
    extra = None if rounds is None else rounds - FORWARD_ROUNDS - BACKWARD_ROUNDS
    group.destroy()
    expected = expected_gradients(rank, 2, torch.float64)
    assert {name.removeprefix("_orig_mod.") for name in got} == set(expected)
    for name, gradient in got.items():
        torch.testing.assert_close(
            gradient, expected[name.removeprefix("_orig_mod.")], msg=lambda m, n=name: f"{n}: {m}"
        )
    return extra


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointing", ["none", "plain", "selective"])
def test_training_equals_one_process(ranks: Callable[[int], RankPool], checkpointing: str, compiled: bool) -> None:
    """Plain checkpointing sends everything again; keeping the outputs of ops sends nothing twice. Compiled, PyTorch
    says what plain checkpointing repeats (2.11 keeps these outputs, 2.13 does not), alike on every rank."""
    extra = ranks(2).run(train, checkpointing, compiled, timeout=PATIENCE)
    again = {"none": {0}, "plain": {0, FORWARD_ROUNDS} if compiled else {FORWARD_ROUNDS}, "selective": {0}}
    assert extra[0] == extra[1] and extra[0] in again[checkpointing]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointing", ["none", "plain"])
def test_training_over_collectives_equals_one_process(
    ranks: Callable[[int], RankPool], checkpointing: str, compiled: bool
) -> None:
    ranks(2).run(train, checkpointing, compiled, "torch_distributed", timeout=PATIENCE)


def compare_compiled_training(rank: Rank, backend: str) -> None:
    torch._dynamo.reset()
    group = open_group(rank.rank, rank.world_size, rank.device.type, backend=backend)
    model = make_model([group])
    x = tokens(5 + rank.rank, rank.rank, device=rank.device)
    eager = run_and_take_gradients(model, x)
    compiled = run_and_take_gradients(torch.compile(model, fullgraph=True, dynamic=True), x)
    for mine, theirs in zip(compiled.values(), eager.values(), strict=True):
        torch.testing.assert_close(mine, theirs)
    group.destroy()


def test_inductor_training_equals_eager(ranks: Callable[[int], RankPool], backend: str) -> None:
    ranks(2).run(compare_compiled_training, backend, timeout=PATIENCE)


STEPS, RATE = 4, 0.02


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step: no two steps of a rank have equally many tokens."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    shape = (2 + step + 3 * rank, HIDDEN)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def train_some_steps(rank: Rank) -> list[float]:
    """SGD in one compiled graph on every rank, against one process with all tokens; this rank's losses."""
    torch._dynamo.reset()
    counters.clear()
    group = open_group(rank.rank, rank.world_size, rank.device.type, dtype=torch.float64)
    model = make_model([group], torch.float64)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    reference = make_reference(1, torch.float64)
    optimizers = [torch.optim.SGD(m.parameters(), RATE, momentum=0.9) for m in (model, reference)]
    losses = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = (tensor.to(rank.device) for tensor in batch(rank.rank, step))
        loss = (compiled(x) - y).square().sum()
        loss.backward()
        gradient = model[0].router.grad.cpu()  # every rank has a router and sees its own tokens
        dist.all_reduce(gradient)
        model[0].router.grad.copy_(gradient)
        losses.append(loss.item())
        x, y = (torch.cat(tensors) for tensors in zip(*(batch(r, step) for r in range(rank.world_size)), strict=True))
        (reference(x) - y).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    own = torch.tensor(list(group.local_experts))
    group.destroy()
    for name, parameter in model[0].named_parameters():
        expected = reference[0].get_parameter(name)
        torch.testing.assert_close(parameter.cpu(), expected if name == "router" else expected[own])
    start = make_reference(1, torch.float64)[0]
    assert not torch.allclose(model[0].router.cpu(), start.router, atol=1e-3)  # it has moved
    assert counters["stats"]["unique_graphs"] == 1
    return losses


def test_compiled_training_ends_where_one_process_does(ranks: Callable[[int], RankPool]) -> None:
    assert [len(losses) for losses in ranks(2).run(train_some_steps, timeout=PATIENCE)] == [STEPS, STEPS]


def test_weights_learn_from_quantized_rows(device: str) -> None:
    """The rows have no gradient in FP8; those of the weights pass."""
    group = open_group(0, 1, device)
    x = tokens(5, device=device)
    ids, start = route(x, tokens(16, 99, device=device)[:, :6])
    weights = start.detach().requires_grad_()

    def step(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = torch_moe_ep.quantize(x, torch_moe_ep.QuantFormat.MXFP8)
        got = torch_moe_ep.dispatch(group, values, ids, weights, hidden_states_scale=scale)
        rows = torch_moe_ep.dequantize(got.hidden_states, got.hidden_states_scale, torch_moe_ep.QuantFormat.MXFP8,
                                       HIDDEN, torch.float32)
        rows = torch.where((got.topk_ids >= 0).any(1, keepdim=True), rows, 0)
        partials = rows * got.topk_weights.sum(1, keepdim=True)
        return torch_moe_ep.combine(group, partials, got.routing, num_tokens=5), rows

    torch._dynamo.reset()
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        weights.grad = None
        out, rows = run(weights)
        assert not rows.requires_grad
        out.sum().backward()
        torch.testing.assert_close(weights.grad, rows[:5].sum(1, keepdim=True).expand(5, 2))
    group.destroy()


def test_a_second_derivative_is_refused(device: str) -> None:
    group = open_group(0, 1, device, dtype=torch.float64)
    ids, x, weights, scale = step_inputs(0, device)
    (gradient,) = torch.autograd.grad(differentiable_step(group, ids, x, weights, scale).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    group.destroy()


# --- Rows that hold no token ------------------------------------------------------------------------------------------


@pytest.fixture
def _nan_in_fresh_tensors() -> object:
    """New tensors are filled with NaN, so that whoever reads an unspecified row shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("_nan_in_fresh_tensors")
def test_rows_without_a_token_do_not_reach_a_gradient(device: str, backend: str) -> None:
    group = open_group(0, 1, device, backend=backend)
    ids = torch.tensor([[0, 5], [-1, -1], [4, 4]], device=device)
    x, weights = tokens(3, device=device).requires_grad_(), torch.ones(3, 2, device=device).requires_grad_()
    got = torch_moe_ep.dispatch(group, x, ids, weights)
    empty = (got.topk_ids < 0).all(1)
    assert empty.sum() == CAPACITY - 2 and got.hidden_states[3:].isnan().all()
    # A lone rank on a GPU and collectives also carry tokens that go nowhere.
    received = torch.where(empty[:, None], torch.nan, got.hidden_states)
    # An expert that computes on every row: empty ones give NaN, and NaN comes back for them.
    rows = received * got.topk_weights.sum(1, keepdim=True)
    rows.retain_grad()
    out = torch_moe_ep.combine(group, rows, got.routing, num_tokens=3)
    out.sum().backward()
    assert rows.grad[empty].eq(0).all()  # whatever a weight gradient sums over empty rows has this factor
    torch.testing.assert_close(out, x * torch.tensor([[2.0], [0.0], [2.0]], device=device))
    torch.testing.assert_close(x.grad, torch.tensor([[2.0], [0.0], [2.0]], device=device).expand_as(x))
    sums = x.detach().sum(1, keepdim=True) * torch.tensor([[1.0], [0.0], [1.0]], device=device)
    torch.testing.assert_close(weights.grad, sums.expand_as(weights))
    group.destroy()


@pytest.mark.usefixtures("_nan_in_fresh_tensors")
def test_gradients_of_a_model_are_finite(device: str, backend: str) -> None:
    group = open_group(0, 1, device, backend=backend)
    gradients = run_and_take_gradients(make_model([group, group]), tokens(5, device=device))
    reference = run_and_take_gradients(make_reference(2, torch.float32, device), tokens(5, device=device))
    for mine, theirs in zip(gradients.values(), reference.values(), strict=True):
        torch.testing.assert_close(mine, theirs)
    group.destroy()


def test_no_gradient_is_sent_for_inputs_that_want_none(device: str) -> None:
    group = open_group(0, 1, device)
    x = tokens(5, device=device)
    ids, weights = route(x, tokens(16, 99, device=device)[:, :6])

    def rounds_of(x: torch.Tensor, weights: torch.Tensor) -> int:
        got = torch_moe_ep.dispatch(group, x, ids, weights)
        loss = got.hidden_states.sum() + got.topk_weights.sum()
        before = group.describe()["rounds"]
        loss.backward()
        return group.describe()["rounds"] - before

    assert rounds_of(x.clone().requires_grad_(), weights) == 1
    assert rounds_of(x, weights.clone().requires_grad_()) == 1
    assert rounds_of(x.clone().requires_grad_(), weights.clone().requires_grad_()) == 2
    group.destroy()
