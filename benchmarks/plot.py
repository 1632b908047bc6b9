"""Draws results/scaling.jsonl as results/scaling.svg. Needs the ``plot`` extra."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

RESULTS = Path(__file__).with_name("results")


def main() -> None:
    rows = [json.loads(line) for line in (RESULTS / "scaling.jsonl").read_text().splitlines()]
    matplotlib.rcParams["svg.hashsalt"] = "moe_ep"  # equal input, equal file
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
    figure.tight_layout()
    figure.savefig(RESULTS / "scaling.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
