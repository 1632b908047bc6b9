"""README.md: its programs run and are right, and its worked example is what dispatch and combine do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import Rank

import torch_moe_ep as ep

README = (Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)

# Put before a program: memory that nobody has written to is NaN, so that it shows where it is used.
NAN_IN_EMPTY_ROWS = "import torch\ntorch.use_deterministic_algorithms(True)\n"
# Put before the end of a program, whose names it uses: the same layer with all experts in one process.
CHECK = """
everyones = [None] * W
dist.all_gather_object(everyones, experts.state_dict())
weights = {name: value for of_rank in everyones for name, value in of_rank.items()}
expected = torch.zeros_like(x)
for t in range(len(x)):
    for k in range(K):
        e = topk_ids[t, k].item()
        expected[t] += topk_weights[t, k] * (weights[f"{e}.weight"] @ x[t] + weights[f"{e}.bias"])
torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
if y.requires_grad and any(p.grad is not None for p in experts.parameters()):  # of y.sum()
    batches = [None] * W
    dist.all_gather_object(batches, (x, topk_ids, topk_weights))
    for e, expert in experts.items():
        weight_of_tokens = sum(((w * (ids == int(e))).sum(1) @ rows for rows, ids, w in batches), torch.zeros(H))
        torch.testing.assert_close(expert.weight.grad, weight_of_tokens.expand(H, H), rtol=1e-4, atol=1e-4)
dist.barrier()
"""


@pytest.mark.parametrize("number", range(2))
def test_program_runs_under_torchrun(number: int, tmp_path: Path) -> None:
    assert len(PROGRAMS) == 2
    program = tmp_path / "use.py"
    end = "dist.destroy_process_group()\n"
    assert PROGRAMS[number].endswith(end)
    program.write_text(NAN_IN_EMPTY_ROWS + PROGRAMS[number].removesuffix(end) + CHECK + end)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)],
        capture_output=True, text=True, timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr


TOKENS = ["abc", "de"]  # by rank
IDS = [[[0, 2], [1, 0], [3, -1]], [[2, 3], [1, 3]]]


def run_example(me: Rank) -> tuple[str, list[list[int]], torch.Tensor]:
    params = ep.MoEEpCommParams(num_experts=4, top_k=2, max_tokens_per_rank=3, hidden_size=1, dtype=torch.float32)
    group = ep.create_communication(ep.BootstrapConfig(2, me.rank), params, "shm_one_sided")
    x = torch.tensor([[float(ord(token))] for token in TOKENS[me.rank]])
    rows = ep.dispatch(group, x, torch.tensor(IDS[me.rank]), tokens_per_rank=3)
    slots = zip(rows.hidden_states, rows.topk_ids, strict=True)
    held = [chr(int(row)) if ids.max() >= 0 else "–" for row, ids in slots]
    # The partial of row i is 10**i on rank 0 and 2 * 10**i on rank 1, so a sum tells its terms.
    partials = (me.rank + 1) * 10.0 ** torch.arange(6).unsqueeze(1)
    y = ep.combine(group, partials, rows.routing, num_tokens=len(x))
    group.destroy()
    return "".join(held), rows.topk_ids.tolist(), y.flatten()


def test_worked_example(ranks) -> None:  # type: ignore[no-untyped-def]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines()
             if re.match(r"\| \d \| rank ", line)]
    assert [row[0] for row in table] == list("012345")
    results = ranks(2).run(run_example)
    for rank, (held, ids, _) in enumerate(results):
        assert list(held) == [row[2 + 2 * rank] for row in table]
        assert [str(row) for row in ids] == [row[3 + 2 * rank] for row in table]
    sums = re.findall(r"\b([a-e]) = (p[01]\[\d\](?: \+ p[01]\[\d\])*)", README)
    assert [token for token, _ in sums] == list("abcde")
    said = [sum((int(rank) + 1) * 10.0 ** int(row) for rank, row in re.findall(r"p([01])\[(\d)\]", terms))
            for _, terms in sums]
    assert torch.cat([y for _, _, y in results]).tolist() == said
