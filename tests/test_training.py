"""50 compiled steps of training on several ranks: every loss is that of one process in plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_model import PATIENCE

ROOT = Path(__file__).resolve().parent.parent


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    out = tmp_path / "losses.jsonl"
    command = ["-m", "benchmarks.loss_curves", "--ranks", "2", "--dtypes", "float64", "--out", str(out)]
    run = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=PATIENCE,
        capture_output=True, text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr  # it fails if a loss strays
    plain, ranks = (json.loads(line) for line in out.read_text().splitlines())
    assert (plain["way"], ranks["way"], ranks["ranks"], ranks["graphs"]) == ("plain", "layer", 2, 1)
    assert len(ranks["losses"]) == 50 and ranks["last_loss"] < 0.3 * ranks["first_loss"]
    for mine, theirs in zip(ranks["losses"], plain["losses"], strict=True):
        assert abs(mine / theirs - 1) < 1e-12
