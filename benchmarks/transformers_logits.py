"""How far the logits of expert-parallel Transformers models lie from those of one process, and the experts' memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import DTYPES, Results, parser, run_ranks
from torch_moe_ep import BootstrapConfig
from torch_moe_ep.integrations.transformers import expert_parallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from transformers_models import CONFIGS, EXPERTS, make_model, prompt  # noqa: E402

CAPACITY, BATCH, LENGTH = 128, 4, 16  # sequences of rank r: BATCH of LENGTH + r tokens
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    # Where a token chooses, a rounding can choose other experts in a later layer; here it goes to all of them.
    "bfloat16": {"num_experts_per_tok": EXPERTS, "n_group": 1, "topk_group": 1},
}


def expert_bytes(model: Any) -> int:
    return sum(p.untyped_storage().nbytes() for name, p in model.named_parameters() if ".experts." in name)


@torch.no_grad()
def compare(rank: int, world_size: int, dtype: str) -> list[dict[str, float]]:
    """Per family: of this rank, the largest difference and the largest logit, bytes of experts before and after."""
    torch.set_num_threads(1)
    rows = []
    for family in CONFIGS:
        model = make_model(family, DTYPES[dtype], **SETTINGS[dtype])
        tokens, before = prompt(rank, BATCH, LENGTH + rank), expert_bytes(model)
        expected = model(tokens).logits.float()
        expert_parallel(model, BootstrapConfig(world_size, rank), max_tokens_per_rank=CAPACITY)
        error = (model(tokens).logits.float() - expected).abs().max().item()
        model.expert_parallel.destroy()
        rows.append({"error": error, "largest": expected.abs().max().item(), "before": before,
                     "after": expert_bytes(model)})
    return rows


def main() -> None:
    a = parser(__doc__).parse_args()
    import transformers

    results = Results("transformers_logits", a.out)
    for dtype in SETTINGS:
        for world_size in (1, 2, 4):
            ranks = run_ranks(compare, world_size, world_size, dtype)
            for family, rows in zip(CONFIGS, zip(*ranks, strict=True), strict=True):
                largest = max(row["largest"] for row in rows)
                error = max(row["error"] for row in rows)
                results.emit(
                    family=family, dtype=dtype, ranks=world_size,
                    max_error=float(f"{error:.3g}"), max_logit=round(largest, 3),
                    relative_error=float(f"{error / largest:.3g}"),
                    expert_bytes=rows[0]["before"], expert_bytes_by_rank=[row["after"] for row in rows],
                    transformers=transformers.__version__,
                )


if __name__ == "__main__":
    main()
