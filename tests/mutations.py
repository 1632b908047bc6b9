"""Takes one safeguard at a time out of a copy of the tree and lists the tests that notice.

    python tests/mutations.py [word ...]     only the mutations whose name has one of the words

Writes tests/results/mutations.txt (when all ran) and exits with 1 when a mutation breaks no test. Strings are replaced
exactly; one that is not found once stops the run: the sources have moved on, and so must the mutation.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "results" / "mutations.txt"
FENCE, DISPATCH, COMBINE = "csrc/transport/fence.h", "csrc/cpu/dispatch.cpp", "csrc/cpu/combine.cpp"
SHM, WINDOW = "csrc/memory/shm.cpp", "csrc/window.h"
ROWS, PROTOCOL, FAILURES, HOSTILE = "test_rows.py", "test_protocol.py", "test_failures.py", "test_hostile.py"
OVERLAP = "test_overlap.py"

FLAG = "    fence.delay(DelayPoint::kBeforeFlag);\n    fence.signal(peer, header);\n"
EARLY_FLAG = "    fence.signal(peer, header);\n    fence.delay(DelayPoint::kBeforeFlag);\n"
PUT_IDS = "    const Window window = comm.window(peer);\n    std::copy(ids.begin()"
PUT_PARTIALS = "    fence.await_reuse(peer);\n"
REUSE = "    const uint64_t last = state_.last_round[static_cast<int>(kind_)];\n"
HEARD = "state_.heard[static_cast<size_t>(peer)]"
PEER_FLAG = "window.flag(comm_.offsets(), comm_.shape(), round_, comm_.rank())"
OWN_FLAG = "own().flag(comm_.offsets(), comm_.shape(), round_, peer)"
PEER_HEADER = "window.header(comm_.offsets(), comm_.shape(), round_, comm_.rank())"
OWN_HEADER = "own().header(comm_.offsets(), comm_.shape(), round_, peer)"
POST_DONE = "      store_release(comm.window(*p).done(comm.offsets(), comm.rank()), round_ - 1);\n"
TARGETS = """\
    for (int32_t j = 0; j < a.max_targets && here; ++j) {
      const int32_t rank = targets[static_cast<int64_t>(j) * a.tokens_per_rank + t];
"""
TARGETS_BY_RANK = """\
    for (int32_t i = 0; i < a.max_targets * comm.ep_size() && here; ++i) {
      const int32_t j = i % a.max_targets;
      const int32_t rank = targets[static_cast<int64_t>(j) * a.tokens_per_rank + t];
      if (rank != i / a.max_targets) continue;
"""


@dataclass
class Mutation:
    """What is taken out: (file, text, other text) replaced in turn; and the file of tests that is run."""

    name: str
    edits: list[tuple[str, str, str]]
    tests: str = PROTOCOL


MUTATIONS = [
    Mutation("dispatch: flag before the ids", [(DISPATCH, FLAG, ""), (DISPATCH, PUT_IDS, EARLY_FLAG + PUT_IDS)]),
    Mutation("combine: flag before the partials",
             [(COMBINE, FLAG, ""), (COMBINE, PUT_PARTIALS, PUT_PARTIALS + EARLY_FLAG)]),
    Mutation("credit wait removed", [(FENCE, REUSE, "    return;\n" + REUSE)]),
    Mutation("credit wait removed in dispatch",
             [(FENCE, REUSE, "    if (kind_ == OpKind::kDispatch) return;\n" + REUSE)]),
    Mutation("credit wait removed in combine",
             [(FENCE, REUSE, "    if (kind_ == OpKind::kCombine) return;\n" + REUSE)]),
    Mutation("a flag of the same round taken for completion", [(FENCE, HEARD + " > last", HEARD + " >= last")]),
    Mutation("done word not posted", [(FENCE, POST_DONE, "      (void)p;\n")]),
    Mutation("done word posted a round early", [(FENCE, POST_DONE, POST_DONE.replace("round_ - 1", "round_"))]),
    Mutation("one parity of flags", [(FENCE, PEER_FLAG, PEER_FLAG.replace("round_", "0")),
                                     (FENCE, OWN_FLAG, OWN_FLAG.replace("round_", "0"))]),
    Mutation("one parity of headers", [(FENCE, PEER_HEADER, PEER_HEADER.replace("round_", "0")),
                                       (FENCE, OWN_HEADER, OWN_HEADER.replace("round_", "0"))]),
    Mutation("header not compared", [(FENCE, "      if (!text.empty()) {\n", "      if (false) {\n")],
             FAILURES),
    Mutation("ids not sanitised", [(DISPATCH, "split.contains(id) ? static_cast<int32_t>(id) : a.invalid_expert_id",
                                    "static_cast<int32_t>(id)")], ROWS),
    Mutation("int64 ids narrowed before the comparison",
             [(DISPATCH, "? static_cast<const int64_t*>(a.topk_ids)[at]",
               "? static_cast<int32_t>(static_cast<const int64_t*>(a.topk_ids)[at])")], ROWS),
    Mutation("ids of empty rows not written",
             [(DISPATCH, "        std::fill_n(out_ids, a_.top_k, a_.invalid_expert_id);\n", "")], ROWS),
    Mutation("sums in the order of ranks", [(COMBINE, TARGETS, TARGETS_BY_RANK)], ROWS),
    Mutation("sums rounded at every step",
             [(COMBINE, "sums[i] += Codec<T>::load(row[i])",
               "sums[i] = Codec<T>::load(Codec<T>::store(sums[i] + Codec<T>::load(row[i])))")], ROWS),
    Mutation("sums started from zero",
             [(COMBINE, "sums[i] = Codec<T>::load(row[i]);", "sums[i] = 0 + Codec<T>::load(row[i]);")], ROWS),
    Mutation("tokens without a target not zeroed",
             [(COMBINE, "      std::memset(out, 0, static_cast<size_t>(row_bytes));\n", "")], ROWS),
    Mutation("ranks masked at dispatch summed",
             [(DISPATCH, "j < count && here && HostFence::is_active(mask, targets[j])", "j < count")], HOSTILE),
    Mutation("ranks masked at combine summed",
             [(COMBINE, " || !HostFence::is_active(mask, rank)) continue;", ") continue;")], HOSTILE),
    Mutation("second thread not refused",
             [(FENCE, "if (!state_.busy.compare_exchange_strong(expected, true))", "if (expected)")], FAILURES),
    Mutation("op between a start and its wait not refused",
             [(FENCE, "    if (!misuse.empty()) {\n", "    if (false) {\n")], OVERLAP),
    Mutation("a wait with the mask of the moment", [(FENCE, "      mask_ = state_.started.mask;\n", "")], OVERLAP),
    Mutation("a step's form not compared", [(WINDOW, "    default: return h.phases;\n", "    default: return 0;\n")],
             OVERLAP),
    Mutation("credit wait removed, start and wait apart", [(FENCE, REUSE, "    return;\n" + REUSE)], OVERLAP),
    Mutation("start forgotten at once", [(FENCE, "    if (phase_ == Phase::kWait) state_.started.round = 0;\n",
                                          "    if (phase_ != Phase::kWhole) state_.started.round = 0;\n")], OVERLAP),
    Mutation("failure forgotten", [(FENCE, "    state_.fail(failure);\n", "")], FAILURES),
    Mutation("names of windows not removed", [(SHM, "    shm_unlink(name_.c_str());\n    ::close", "    ::close")],
             FAILURES),
]


def replace_once(path: Path, text: str, other: str) -> None:
    source = path.read_text()
    if source.count(text) != 1:
        sys.exit(f"mutations.py: {path.name} has this text {source.count(text)} times, expected once:\n{text}")
    path.write_text(source.replace(text, other))


def build(tree: Path) -> None:
    done = subprocess.run(
        ["env", "TORCH_MOE_EP_CUDA=0", sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree, capture_output=True, text=True,
    )
    if done.returncode:
        sys.exit(f"mutations.py: the copy does not build:\n{done.stdout}{done.stderr}")


def failing(tree: Path, *tests: str) -> Counter[str]:
    """Failing test functions and in how many of their cases."""
    files = [f"tests/{name}" for name in tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *files],
        cwd=tree, capture_output=True, text=True,
    )
    if done.returncode not in (0, 1):
        sys.exit(f"mutations.py: pytest did not run:\n{done.stdout}{done.stderr}")
    return Counter(re.findall(r"^(?:FAILED|ERROR) tests/(\w+\.py::\w+)", done.stdout, re.MULTILINE))


def sweep() -> None:
    """A mutant may leave windows behind: removes those of processes that are no more."""
    for window in Path("/dev/shm").glob("moe_ep_*"):
        if not Path("/proc", window.name.split("_")[2]).exists():
            window.unlink(missing_ok=True)


def main() -> int:
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    lines, survivors = [], 0
    with tempfile.TemporaryDirectory(prefix="moe_ep_mutations_") as directory:
        tree = Path(directory) / "tree"
        built = shutil.ignore_patterns(".git", ".venv", "dist", "build", "__pycache__", "*.so")
        shutil.copytree(ROOT, tree, ignore=built)
        # A rank that waits for what never comes need not wait long.
        replace_once(tree / "tests" / "cases.py", "TIMEOUT_SEC = 20\n", "TIMEOUT_SEC = 10\n")
        build(tree)
        broken = failing(tree, ROWS, PROTOCOL, FAILURES, HOSTILE, OVERLAP)
        if broken:
            sys.exit(f"mutations.py: tests fail without any mutation: {dict(broken)}")
        for mutation in chosen:
            originals = {name: (tree / name).read_text() for name, _, _ in mutation.edits}
            for name, text, other in mutation.edits:
                replace_once(tree / name, text, other)
            build(tree)
            broken = failing(tree, mutation.tests)
            for name, text in originals.items():
                (tree / name).write_text(text)
            sweep()
            survivors += not broken
            noticed = ", ".join(f"{name} ({count})" for name, count in sorted(broken.items()))
            lines.append(f"{mutation.name} -> {noticed or 'NOTHING NOTICES'}")
            print(lines[-1], flush=True)
    if not words:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("\n".join(lines) + "\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
