"""Tiny models of Transformers with random weights, one per family that the integration supports."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, EXPERTS, LAYERS, END = 96, 6, 2, 2  # END: the token that ends a sequence
_ALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 128, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END,
}
_FINE = {"moe_intermediate_size": 24}  # the inner size of an expert where it is not that of a dense layer
_SHARED = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralConfig", {"num_local_experts": EXPERTS}),
    "Qwen2-MoE": ("Qwen2MoeConfig", {**_FINE, "num_experts": EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {**_FINE, "num_experts": EXPERTS, "num_experts_per_tok": 3, "head_dim": 8,
                                     "norm_topk_prob": True}),
    "DeepSeek-V2": ("DeepseekV2Config", {**_FINE, **_SHARED, **_LATENT_ATTENTION, "n_group": 2, "topk_group": 1}),
    "DeepSeek-V3": ("DeepseekV3Config", {**_FINE, **_SHARED, **_LATENT_ATTENTION, "n_group": 2, "topk_group": 1}),
    "GLM-4-MoE": ("Glm4MoeConfig", {**_FINE, **_SHARED, "head_dim": 8, "n_group": 1, "topk_group": 1}),
    "OLMoE": ("OlmoeConfig", {"num_experts": EXPERTS}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 8,
                                 "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
}
"""Family: its configuration class and what that takes beyond the sizes of all."""


def make_model(
    family: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **config: Any
) -> Any:
    """The model for causal language modelling, the same on every rank, in evaluation mode."""
    import transformers

    kind, sizes = CONFIGS[family]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**_ALL, **sizes, **config}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that logits depend on which expert a token went to, and on biases.
            spread = 1.0 if "norm" in name else 0.5 if "expert" in name or "bias" in name else 0.2
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model.eval().to(device, dtype)


def prompt(rank: int, batch: int, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """``[batch, length]`` tokens of a rank, without special ones."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator).to(device)
