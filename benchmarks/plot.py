"""Draws results/scaling.jsonl and loss_curves.jsonl as SVG files beside them. Needs the ``plot`` extra."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

RESULTS = Path(__file__).with_name("results")


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "moe_ep"  # equal input, equal file
    for name, draw in (("scaling", draw_scaling), ("loss_curves", draw_loss_curves)):
        figure = draw([json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()])
        figure.tight_layout()
        figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})


def draw_scaling(rows: list[dict[str, Any]]) -> plt.Figure:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, by, along in ((axes[0], "ranks", "tokens"), (axes[1], "tokens", "ranks")):
        lines: dict[int, list[dict[str, float]]] = defaultdict(list)
        for row in rows:
            lines[row[by]].append(row)
        for number, (value, line) in enumerate(sorted(lines.items())):
            line.sort(key=lambda row: row[along])
            x = [row[along] for row in line]
            axis.plot(x, [row["us"] for row in line], f"C{number}o-", label=f"{value} {by}")
            low, high = [row["us_q1"] for row in line], [row["us_q3"] for row in line]
            axis.fill_between(x, low, high, color=f"C{number}", alpha=0.2)
            axis.plot(x, [row["gloo_us"] for row in line], f"C{number}x:", alpha=0.6)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel(f"{along} per rank" if along == "tokens" else along)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    first = rows[0]
    axes[0].set_ylabel("µs per dispatch + combine")
    figure.suptitle(
        f"One-sided over shared memory (solid) and all_to_all_single on gloo (dotted): {first['dtype']}, "
        f"H = {first['hidden_size']}, K = {first['top_k']}, E = {first['experts']}, {first['cores']} cores",
        fontsize=10,
    )
    return figure


def draw_loss_curves(rows: list[dict[str, Any]]) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    plain = {row["dtype"]: row["losses"] for row in rows if row["way"] == "plain"}
    for number, row in enumerate(rows):
        way = {"plain": "one process, plain torch", "layer": f"{row['ranks']} ranks"}.get(
            row["way"], f"{row['ranks']} ranks, {row['way']} dispatch"
        )
        steps, label = range(1, row["steps"] + 1), f"{way}, {row['dtype']}"
        left.plot(steps, row["losses"], f"C{number}", linewidth=1, label=label)
        if row["way"] == "plain":
            continue
        errors = [abs(loss / aim - 1) for loss, aim in zip(row["losses"], plain[row["dtype"]], strict=True)]
        right.plot(steps, [max(error, 1e-17) for error in errors], f"C{number}", linewidth=1, label=label)
        right.axhline(row["allowed"], color=f"C{number}", linestyle=":", alpha=0.5)
    left.set_ylabel("loss")
    right.set_ylabel("relative difference to one process; dotted: allowed")
    right.set_yscale("log")
    for axis in (left, right):
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle("Training with MoEEpLayer, compiled: losses of the same batches", fontsize=10)
    return figure


if __name__ == "__main__":
    main()
