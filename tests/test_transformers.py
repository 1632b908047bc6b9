"""Models of Transformers made expert-parallel: logits, memory, generation, compilation, gradients, checkpoints."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from cases import bootstrap_of
from ranks import Rank, RankPool
from tiny_model import PATIENCE
from transformers_models import CONFIGS, END, EXPERTS, LAYERS, make_model, prompt

from torch_moe_ep import BootstrapConfig, QuantFormat
from torch_moe_ep.integrations import transformers as integration
from torch_moe_ep.integrations.transformers import ExpertParallelExperts, expert_parallel, gather_state_dict

transformers = pytest.importorskip("transformers")

CAPACITY = 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
"""Allowed difference of logits, as a fraction of the largest: a token's expert outputs are added in another order, and
in bfloat16 rounded where Transformers rounds elsewhere."""


def parallelize(rank: Rank, model: Any, **options: Any) -> Any:
    bootstrap = bootstrap_of(rank.world_size, rank.rank, rank.device)
    return expert_parallel(model, bootstrap, **{"max_tokens_per_rank": CAPACITY, **options})


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a fraction of the largest value."""
    return ((got - expected).abs().max() / expected.abs().max()).item()


def expert_modules(model: Any) -> list[ExpertParallelExperts]:
    return [module for module in model.modules() if isinstance(module, ExpertParallelExperts)]


def tokens_of(rank: Rank) -> torch.Tensor:
    return prompt(rank.rank, 1 + rank.rank % 2, 4 + 3 * rank.rank, rank.device)


# --- Logits -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def compare_logits(rank: Rank, family: str, dtype: torch.dtype, **config: Any) -> tuple[float, float]:
    """The error of the logits, and that with the experts of every rank in another order."""
    model = make_model(family, dtype, rank.device, **config)
    tokens = tokens_of(rank)
    expected = model(tokens).logits.float()
    model = parallelize(rank, model)
    error = error_of(model(tokens).logits.float(), expected)
    for module in expert_modules(model):
        module.down_proj.copy_(module.down_proj.roll(1, 0) if module.num_local_experts > 1 else -module.down_proj)
    wrong = error_of(model(tokens).logits.float(), expected)
    model.expert_parallel.destroy()
    return error, wrong


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_one_process(ranks: Callable[[int], RankPool], family: str, world_size: int) -> None:
    for error, wrong in ranks(world_size).run(compare_logits, family, torch.float32, timeout=PATIENCE):
        assert error <= TOLERANCE[torch.float32]
        assert wrong > 1e-2  # the measure sees which expert computed


@torch.no_grad()
def compare_bfloat16(rank: Rank, family: str) -> tuple[float, float]:
    """Every token goes to all experts: where it chooses, a rounding can choose another expert in a later layer."""
    return compare_logits(rank, family, torch.bfloat16, num_experts_per_tok=EXPERTS, n_group=1, topk_group=1)


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_in_bfloat16(ranks: Callable[[int], RankPool], family: str) -> None:
    for error, wrong in ranks(2).run(compare_bfloat16, family, timeout=PATIENCE):
        assert error <= TOLERANCE[torch.bfloat16] < wrong


@torch.no_grad()
def compare_over_collectives(rank: Rank) -> float:
    model = make_model("Qwen3-MoE", device=rank.device)
    expected = model(tokens_of(rank)).logits
    error = error_of(parallelize(rank, model, backend="torch_distributed")(tokens_of(rank)).logits, expected)
    model.expert_parallel.destroy()
    return error


def test_logits_over_collectives(ranks: Callable[[int], RankPool]) -> None:
    assert max(ranks(4).run(compare_over_collectives, timeout=PATIENCE)) <= TOLERANCE[torch.float32]


def test_every_family_has_a_tiny_model() -> None:
    assert list(CONFIGS) == list(integration.FAMILIES)


@torch.no_grad()
def more_ranks_than_experts(rank: Rank) -> float:
    model = make_model("gpt-oss", device=rank.device, num_local_experts=3)
    expected = model(tokens_of(rank)).logits
    error = error_of(parallelize(rank, model)(tokens_of(rank)).logits, expected)
    model.expert_parallel.destroy()
    return error


def test_a_rank_without_experts(ranks: Callable[[int], RankPool]) -> None:
    assert max(ranks(4).run(more_ranks_than_experts, timeout=PATIENCE)) <= TOLERANCE[torch.float32]


@torch.no_grad()
def run_what_stays(rank: Rank) -> None:
    """What Transformers records besides the logits, and a copy of the model."""
    model = parallelize(rank, make_model("Qwen3-MoE", device=rank.device))
    expected = make_model("Qwen3-MoE", device=rank.device)(tokens_of(rank), output_router_logits=True)
    for one in (model, copy.deepcopy(model)):
        got = one(tokens_of(rank), output_router_logits=True)
        assert len(got.router_logits) == LAYERS
        for mine, theirs in zip(got.router_logits, expected.router_logits, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.aux_loss, expected.aux_loss)
    model.expert_parallel.destroy()


def test_router_logits_and_copies(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_what_stays, timeout=PATIENCE)


@torch.no_grad()
def send_quantized(rank: Rank) -> tuple[float, float, int]:
    """The error of the logits with tokens sent as FP8 and as they are, and the bytes of a dispatched row."""
    errors = []
    for dispatch_format in (QuantFormat.MXFP8, None):
        config = {"num_experts_per_tok": EXPERTS}  # to all, so that no rounding chooses other experts
        model = make_model("Mixtral", device=rank.device, **config)
        expected = model(tokens_of(rank)).logits
        parallelize(rank, model, dispatch_format=dispatch_format)
        errors.append(error_of(model(tokens_of(rank)).logits, expected))
        sizes = model.expert_parallel.communicators[0].params
        if dispatch_format is not None:
            quantized = sizes.dispatch_bytes_per_token
            with torch.enable_grad():
                model(tokens_of(rank)).logits.square().mean().backward()
            for module in expert_modules(model):
                assert module.down_proj.grad.isfinite().all() and module.down_proj.grad.abs().max() > 1e-4
        model.expert_parallel.destroy()
    return errors[0], errors[1], quantized


def test_tokens_sent_as_fp8(ranks: Callable[[int], RankPool]) -> None:
    for quantized, plain, row_bytes in ranks(2).run(send_quantized, timeout=PATIENCE):
        assert plain <= TOLERANCE[torch.float32]
        assert 1e-4 < quantized < 0.2  # e4m3 keeps 3 bits of a mantissa: up to 1/16 for a value
        assert row_bytes == 32 + 1  # 32 values of a byte and their scale


# --- Memory -----------------------------------------------------------------------------------------------------------


def weigh(rank: Rank) -> tuple[int, int, int, int]:
    """Bytes of experts and of the rest, before and after; checks that the whole experts are gone."""

    def bytes_of(model: Any) -> tuple[int, int]:
        sizes = {"experts": 0, "rest": 0}
        for name, parameter in model.named_parameters():
            sizes["experts" if ".experts." in name else "rest"] += parameter.untyped_storage().nbytes()
        return sizes["experts"], sizes["rest"]

    model = make_model("gpt-oss", device=rank.device)
    before = bytes_of(model)
    whole = [weakref.ref(p.untyped_storage()) for name, p in model.named_parameters() if ".experts." in name]
    parallelize(rank, model)
    gc.collect()
    assert whole and [storage() for storage in whole] == [None] * len(whole)
    assert len(model.expert_parallel.communicators) == 1  # for all layers
    model.expert_parallel.destroy()
    return *before, *bytes_of(model)


def test_ranks_hold_their_share_only(ranks: Callable[[int], RankPool]) -> None:
    weights = ranks(4).run(weigh, timeout=PATIENCE)
    assert len({(experts, rest) for experts, rest, _, _ in weights}) == 1
    experts, rest = weights[0][:2]
    assert all(mine == rest for *_, mine in weights)
    shares = [mine * EXPERTS / experts for _, _, mine, _ in weights]
    assert shares == [2, 2, 1, 1]


# --- Generation -------------------------------------------------------------------------------------------------------

NEW = [3, 9, 6, 1]  # tokens that each rank asks for


@torch.no_grad()
def compare_generation(rank: Rank, setting: dict[str, Any], per_rank: bool, tokens_per_rank: Any) -> tuple[int, int]:
    """Checks the generated tokens; returns the number of ops and how many of them were for results of this rank."""
    tokens, new = tokens_of(rank), NEW[rank.rank] if per_rank else max(NEW)
    setting = {"max_new_tokens": new, "do_sample": False, **setting}
    tokens = tokens[: setting.pop("batch", None)]
    model = make_model("Mixtral", device=rank.device)
    torch.manual_seed(rank.rank)
    expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), **setting)
    parallelize(rank, model, tokens_per_rank=tokens_per_rank)
    torch.manual_seed(rank.rank)
    got = model.generate(tokens, attention_mask=torch.ones_like(tokens), **setting)
    rounds = model.expert_parallel.communicators[0].describe()["rounds"]
    if tokens_per_rank == "agreed":
        assert model.expert_parallel.tokens_per_rank == 2  # the last step: one token per sequence, at most 2 sequences
    model.expert_parallel.destroy()
    assert torch.equal(got, expected)
    assert got.shape[1] > tokens.shape[1]
    return rounds, 2 * LAYERS * new


@pytest.mark.parametrize("tokens_per_rank", [None, "agreed"])
def test_generation_of_different_lengths(ranks: Callable[[int], RankPool], tokens_per_rank: Any) -> None:
    """A rank that is finished goes on with steps for the others' sake: all issue the ops of the longest."""
    done = ranks(4).run(compare_generation, {"eos_token_id": None}, True, tokens_per_rank, timeout=PATIENCE)
    assert [mine for _, mine in done] == [2 * LAYERS * new for new in NEW]
    assert {rounds for rounds, _ in done} == {2 * LAYERS * max(NEW)}


SETTINGS = {
    "sampling": {"do_sample": True, "temperature": 0.7},
    "beams": {"num_beams": 2},
    "static cache": {"cache_implementation": "static"},
    "candidates from the prompt": {"prompt_lookup_num_tokens": 2, "batch": 1},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_generation_settings(ranks: Callable[[int], RankPool], setting: str) -> None:
    per_rank = setting != "static cache"  # which asks for the same number of new tokens
    done = ranks(2).run(compare_generation, SETTINGS[setting], per_rank, None, timeout=PATIENCE)
    assert len({rounds for rounds, _ in done}) == 1


@torch.no_grad()
def end_early(rank: Rank) -> tuple[int, int]:
    """A sequence ends by its end token, on rank 0 in its first step."""
    tokens = tokens_of(rank)
    model = make_model("Qwen3-MoE", device=rank.device)
    first = int(model(tokens[:1]).logits[0, -1].argmax())
    setting = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": first if rank.rank == 0 else END}
    expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), **setting)
    parallelize(rank, model)
    got = model.generate(tokens, attention_mask=torch.ones_like(tokens), **setting)
    rounds = model.expert_parallel.communicators[0].describe()["rounds"]
    model.expert_parallel.destroy()
    assert torch.equal(got, expected)
    return rounds, got.shape[1] - tokens.shape[1]


def test_generation_that_ends_early(ranks: Callable[[int], RankPool]) -> None:
    (rounds, new), (other_rounds, other_new) = ranks(2).run(end_early, timeout=PATIENCE)
    assert new == 1 < other_new and rounds == other_rounds == 2 * LAYERS * other_new


def refuse_what_falls_out_of_step(rank: Rank) -> None:
    model = parallelize(rank, make_model("Mixtral", device=rank.device))
    tokens = tokens_of(rank)
    with pytest.raises(ValueError, match="max_new_tokens: expected the same int on every rank.*got \\[3, 9\\]"):
        model.generate(tokens, max_new_tokens=NEW[rank.rank], cache_implementation="static" if rank.rank else None)
    with pytest.raises(ValueError, match="prefill_chunk_size: expected None on every rank.*got \\[None, 2\\]"):
        model.generate(tokens, max_new_tokens=2, prefill_chunk_size=2 if rank.rank else None)
    with pytest.raises(ValueError, match="use_cache: expected True on every rank"):
        model.generate(tokens, max_new_tokens=2, use_cache=rank.rank == 0)
    with pytest.raises(ValueError, match="cache_implementation: .* got \\['paged', None\\]"):
        model.generate(tokens, max_new_tokens=2, cache_implementation=None if rank.rank else "paged")
    assert model.expert_parallel.communicators[0].describe()["rounds"] == 0
    assert model.generate(tokens, max_new_tokens=1).shape[1] == tokens.shape[1] + 1
    model.expert_parallel.destroy()


def test_generation_refuses_what_falls_out_of_step(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(refuse_what_falls_out_of_step, timeout=PATIENCE)


# --- The number of tokens of a step -----------------------------------------------------------------------------------


@torch.no_grad()
def disagree_about_tokens(rank: Rank) -> None:
    model = parallelize(rank, make_model("Mixtral", device=rank.device), tokens_per_rank="agreed")
    state = model.expert_parallel
    for lengths, expected in (((1, 1), 1), ((3, 5), 8), ((33, 2), 64), ((40, 64), 64)):
        model.model(prompt(0, 1, lengths[rank.rank], rank.device))  # the base model alone
        assert state.tokens_per_rank == expected
    model(inputs_embeds=model.get_input_embeddings()(prompt(0, 2, 1 + rank.rank, rank.device)))
    assert state.tokens_per_rank == 4
    with pytest.raises(ValueError, match="max_tokens_per_rank = 64 tokens .* got 65; pass a larger expert_parallel"):
        model(prompt(0, 1, 65 if rank.rank == 0 else 2, rank.device))  # both raise: rank 1 does not wait
    assert torch.isfinite(model(prompt(0, 1, 2, rank.device)).logits).all()
    state.destroy()


def test_agreed_tokens_per_rank(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(disagree_about_tokens, timeout=PATIENCE)


@torch.no_grad()
def test_a_step_beyond_its_capacity(device: str) -> None:
    model = expert_parallel(
        make_model("Mixtral", device=device), BootstrapConfig(1, 0), max_tokens_per_rank=8, tokens_per_rank=4
    )
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts: .*tokens_per_rank = 4 .* got 5; set model"):
        model(prompt(0, 1, 5, device))
    model.expert_parallel.tokens_per_rank = 8
    with pytest.raises(ValueError, match=r"max_tokens_per_rank = 8 tokens .* got 9; pass a larger expert_parallel"):
        model(prompt(0, 3, 3, device))
    for value, error in ((9, ValueError), (0, ValueError), (2.0, TypeError)):
        with pytest.raises(error, match="tokens_per_rank: expected"):
            model.expert_parallel.tokens_per_rank = value
    assert model(prompt(0, 1, 8, device)).logits.shape[1] == 8
    model.expert_parallel.destroy()
    with pytest.raises(ValueError, match="no communicator"):
        model(prompt(0, 1, 8, device))


# --- Models that do not fit -------------------------------------------------------------------------------------------


def test_unknown_models_are_refused() -> None:
    bootstrap = BootstrapConfig(1, 0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2}
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts; expected those of Mixtral, .*gpt-oss"):
        expert_parallel(dense, bootstrap, max_tokens_per_rank=4)
    other = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**sizes, num_local_experts=2))
    with pytest.raises(ValueError, match="experts of class PhimoeExperts; expected those of Mixtral, .*GptOssExperts"):
        expert_parallel(other, bootstrap, max_tokens_per_rank=4)
    with pytest.raises(TypeError, match="model: expected a transformers.PreTrainedModel, got Linear"):
        expert_parallel(torch.nn.Linear(2, 2), bootstrap, max_tokens_per_rank=4)


def test_the_range_of_versions_is_that_of_the_package() -> None:
    first, last = integration.SUPPORTED_VERSIONS
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'transformers = ["transformers>={first},<{last}"]' in project


def test_arguments_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap = BootstrapConfig(1, 0)
    model = make_model("Mixtral")
    for options, error, text in (
        ({"max_tokens_per_rank": 0}, ValueError, "max_tokens_per_rank: expected a positive int, got 0"),
        ({"tokens_per_rank": 65}, ValueError, "tokens_per_rank: expected 1..64"),
        ({"tokens_per_rank": "all"}, ValueError, "tokens_per_rank: expected an int, None or 'agreed', got 'all'"),
        ({"device": "meta"}, ValueError, "device: the model has no memory"),
        ({"backend": "nobody"}, KeyError, "nobody"),
        ({"device": "cuda", "backend": "shm_one_sided"}, ValueError, "but the layer is on cuda"),
        ({"dispatch_format": QuantFormat.FP8PerTensor}, ValueError, "dispatch_format: .* without a global scale"),
    ):
        with pytest.raises(error, match=text):
            expert_parallel(model, bootstrap, **{"max_tokens_per_rank": CAPACITY, **options})
    monkeypatch.setattr("transformers.__version__", "4.57.6")
    with pytest.raises(ImportError, match="expected transformers>=5,<6, found 4.57.6"):
        expert_parallel(model, bootstrap, max_tokens_per_rank=CAPACITY)
    monkeypatch.undo()
    expert_parallel(model, bootstrap, max_tokens_per_rank=CAPACITY)  # nothing above has touched it
    with pytest.raises(ValueError, match="expert-parallel already"):
        expert_parallel(model, bootstrap, max_tokens_per_rank=CAPACITY)
    model.expert_parallel.destroy()


# --- Compilation ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def compare_compiled(rank: Rank, family: str, backend: str) -> None:
    torch._dynamo.reset()
    model = make_model(family, device=rank.device)
    lengths = [5 + rank.rank, 11 - rank.rank]
    expected = [model(prompt(0, 2, length, rank.device)).logits for length in lengths]
    parallelize(rank, model)
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    counts = []
    for length, logits in zip(lengths, expected, strict=True):
        got = compiled(prompt(0, 2, length, rank.device), use_cache=False).logits
        assert error_of(got, logits) <= TOLERANCE[torch.float32]
        counts.append(graphs.frame_count)
    assert counts[0] == counts[1] > 0  # the second length runs the graph of the first
    with pytest.raises(Exception, match="max_tokens_per_rank = 64 tokens"):
        compiled(prompt(0, 2, 33, rank.device), use_cache=False)
    model.expert_parallel.destroy()


@pytest.mark.parametrize(
    "family, backend",
    [("Mixtral", "inductor"), ("gpt-oss", "inductor"), ("Qwen3-MoE", "aot_eager"), ("DeepSeek-V3", "aot_eager")],
)
def test_the_forward_is_one_graph(ranks: Callable[[int], RankPool], family: str, backend: str) -> None:
    ranks(2).run(compare_compiled, family, backend, timeout=PATIENCE)


def test_agreement_is_no_part_of_a_graph(device: str) -> None:
    torch._dynamo.reset()
    model = expert_parallel(make_model("Mixtral", device=device), BootstrapConfig(1, 0), max_tokens_per_rank=CAPACITY,
                            tokens_per_rank="agreed")
    tokens = prompt(0, 1, 3, device)
    with pytest.raises(Exception, match="asks the other ranks; set an int to compile one graph"):
        torch.compile(model, fullgraph=True, backend="eager")(tokens, use_cache=False)
    with torch.no_grad():
        got = torch.compile(model, backend="eager")(tokens, use_cache=False).logits
        torch.testing.assert_close(got, model(tokens).logits)
    assert model.expert_parallel.tokens_per_rank == 4
    model.expert_parallel.destroy()


# --- Gradients --------------------------------------------------------------------------------------------------------


def compare_gradients(rank: Rank, family: str, checkpointing: bool, config: dict[str, Any]) -> None:
    """The gradient of the sum of all ranks' losses: an expert's is on its rank, that of the rest the sum over ranks."""

    def loss_of(model: Any, rank_of_tokens: int) -> torch.Tensor:
        tokens = tokens_of(Rank(rank_of_tokens, rank.world_size, rank.device))
        return model(tokens, labels=tokens, use_cache=False).loss

    reference = make_model(family, device=rank.device, **config).train()
    sum(loss_of(reference, r) for r in range(rank.world_size)).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    model = parallelize(rank, make_model(family, device=rank.device, **config).train())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss_of(model, rank.rank).backward()
    experts = {id(p): m.local_experts for m in expert_modules(model) for p in m.parameters()}
    assert {name for name, _ in model.named_parameters()} == set(expected)
    for name, parameter in model.named_parameters():
        mine, whole = parameter.grad, expected[name]
        if id(parameter) in experts:
            local = experts[id(parameter)]
            whole = whole[local.start : local.stop]
        else:
            assert mine is not None, name
            dist.all_reduce(mine)
        torch.testing.assert_close(mine, whole, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    largest = max(gradient.abs().max().item() for name, gradient in expected.items() if ".experts." in name)
    assert largest > 1e-3  # far above the tolerance
    model.expert_parallel.destroy()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("family", ["Mixtral", "DeepSeek-V3", "gpt-oss"])
def test_gradients_equal_one_process(ranks: Callable[[int], RankPool], family: str, checkpointing: bool) -> None:
    ranks(2).run(compare_gradients, family, checkpointing, {}, timeout=PATIENCE)


def test_gradients_with_a_rank_without_experts(ranks: Callable[[int], RankPool]) -> None:
    ranks(4).run(compare_gradients, "gpt-oss", False, {"num_local_experts": 3}, timeout=PATIENCE)


class Poison(torch.autograd.Function):
    """What a grouped kernel may leave in slots without a pair: ``value`` in the forward, NaN in the gradient."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, offsets: torch.Tensor, value: float) -> torch.Tensor:
        ctx.save_for_backward(offsets)
        return Poison.fill(slots, offsets, value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return Poison.fill(grad, *ctx.saved_tensors, float("nan")), None, None

    @staticmethod
    def fill(slots: torch.Tensor, offsets: torch.Tensor, value: float) -> torch.Tensor:
        empty = torch.arange(len(slots), device=slots.device) >= offsets[-1]
        assert empty.any()
        return slots.masked_fill(empty.unsqueeze(1), value)


@pytest.mark.parametrize("value", [float("nan"), 1.0])  # a clamp has no gradient at NaN
@pytest.mark.parametrize("family", ["Mixtral", "gpt-oss"])
def test_slots_without_a_pair_reach_nothing(
    monkeypatch: pytest.MonkeyPatch, device: str, family: str, value: float
) -> None:
    grouped_mm = integration.grouped_mm

    def poisoned(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return Poison.apply(grouped_mm(Poison.apply(rows, offsets, value), weight, offsets), offsets, value)

    monkeypatch.setattr(integration, "grouped_mm", poisoned)
    tokens, models = prompt(0, 2, 7, device), [make_model(family, device=device) for _ in range(2)]
    expert_parallel(models[1], BootstrapConfig(1, 0), max_tokens_per_rank=CAPACITY)
    losses = [model(tokens, labels=tokens).loss for model in models]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for (name, mine), (same, theirs) in zip(*(model.named_parameters() for model in reversed(models)), strict=True):
        assert name == same  # in the same order, as the state of an optimizer has it
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    models[1].expert_parallel.destroy()


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def save_and_load(rank: Rank, directory: str) -> None:
    whole = make_model("gpt-oss", device=rank.device)
    expected, logits = whole.state_dict(), whole(tokens_of(rank)).logits
    model = parallelize(rank, make_model("gpt-oss", device=rank.device))
    for parameter in model.parameters():
        parameter.zero_()
    model.load_state_dict(expected)  # of the whole model: a rank takes its own
    assert error_of(model(tokens_of(rank)).logits, logits) <= TOLERANCE[torch.float32]
    gathered = gather_state_dict(model)
    assert set(gathered) == (set(expected) if rank.rank == 0 else set())
    for name, value in gathered.items():
        torch.testing.assert_close(value.cpu(), expected[name].cpu(), rtol=0, atol=0)
    model.load_state_dict(model.state_dict())  # its own
    model.save_pretrained(directory)
    again = transformers.AutoModelForCausalLM.from_pretrained(directory).to(rank.device)
    torch.testing.assert_close(again(tokens_of(rank)).logits, logits, rtol=0, atol=0)
    model.expert_parallel.destroy()


def test_checkpoints_hold_the_whole_model(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    ranks(2).run(save_and_load, str(tmp_path), timeout=PATIENCE)
