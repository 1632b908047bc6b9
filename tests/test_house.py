"""The rooms of the repository and the borders between them, the table of ops and columns, the two binaries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import expecttest
import pytest
import torch
from mutations import MUTATIONS

import torch_moe_ep
from torch_moe_ep import _C

ROOT = Path(__file__).resolve().parent.parent
OPS = [
    "dispatch", "dispatch_start", "dispatch_wait", "combine", "combine_start", "combine_wait", "combine_out",
]
CODE = {".h", ".cpp", ".cu", ".cuh"}


def includes(*rooms: str) -> list[tuple[Path, str]]:
    return [
        (path.relative_to(ROOT), included)
        for room in rooms
        for path in sorted((ROOT / room).rglob("*"))
        if path.suffix in CODE
        for included in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)
    ]


TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
PYTHON = re.compile(r"^(pybind11/|Python\.h)")


@pytest.mark.parametrize(
    "room, forbidden",
    [
        ("csrc", [TORCH, PYTHON, re.compile("^(ops|meta)/")]),
        ("meta", [PYTHON, re.compile("^(ops|csrc)/")]),
        ("ops", []),
    ],
)
def test_arrows_run_one_way(room: str, forbidden: list[re.Pattern[str]]) -> None:
    found = includes(room)
    assert found, f"no includes under {room}/: is the room elsewhere?"
    assert [(str(path), name) for path, name in found for rule in forbidden if rule.match(name)] == []
    # Own headers by their path from the root, so that the rooms can be told apart.
    own = {path.name for path in (ROOT / room).rglob("*.h")}
    assert [(str(path), name) for path, name in found if name in own] == []


def test_only_the_control_plane_sees_python_and_it_sees_no_torch() -> None:
    seen = {str(path) for path, name in includes("ops", "meta", "csrc") if PYTHON.match(name)}
    assert seen == {"ops/control.cpp"}
    assert [name for path, name in includes("ops") if path.name == "control.cpp" and TORCH.match(name)] == []


def test_the_package_imports_no_room() -> None:
    """ops/, meta/ and csrc/ are rooms of the repository, never import names."""
    pattern = re.compile(r"^\s*(from|import)\s+(ops|meta|csrc)\b", re.MULTILINE)
    assert [p.name for p in (ROOT / "torch_moe_ep").rglob("*.py") if pattern.search(p.read_text())] == []


def test_every_op_has_every_column() -> None:
    columns = ["CPU", "Meta", *(["CUDA"] if _C.has_cuda else [])]
    empty = [
        f"{op} on {column}"
        for op in OPS
        for column in columns
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_ep::{op}", column)
    ]
    assert empty == []
    assert [op for op in OPS if torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_ep::{op}", "XPU")] == []


class Schemas(expecttest.TestCase):
    def test_schemas(self) -> None:
        """Graphs hold these strings: a change here is a change for everyone who has saved one."""
        names = sorted(schema for schema in torch._C._dispatch_get_all_op_names() if schema.startswith("moe_ep::"))
        schemas = [str(getattr(torch.ops.moe_ep, name.removeprefix("moe_ep::")).default._schema) for name in names]
        lines = "\n".join(schemas).replace(", ", ",\n    ")
        self.assertExpectedInline(lines, """\
moe_ep::combine(Tensor expert_output,
    Tensor routing,
    Tensor(a!) order,
    *,
    SymInt num_tokens,
    int ep_size,
    Tensor? active_rank_mask=None,
    int timeout_sec=300,
    str comm) -> Tensor
moe_ep::combine_out(Tensor expert_output,
    Tensor routing,
    Tensor(a!) order,
    *,
    SymInt num_tokens,
    int ep_size,
    Tensor? active_rank_mask=None,
    int timeout_sec=300,
    str comm,
    Tensor(b!) out) -> ()
moe_ep::combine_start(Tensor expert_output,
    Tensor routing,
    Tensor(a!) order,
    *,
    SymInt num_tokens,
    int ep_size,
    Tensor? active_rank_mask=None,
    int timeout_sec=300,
    str comm) -> Tensor pending
moe_ep::combine_wait(Tensor expert_output,
    Tensor routing,
    Tensor pending,
    Tensor? after,
    Tensor(a!) order,
    *,
    SymInt num_tokens,
    int ep_size,
    Tensor? active_rank_mask=None,
    int timeout_sec=300,
    str comm) -> Tensor
moe_ep::dispatch(Tensor hidden_states,
    Tensor topk_ids,
    Tensor? topk_weights,
    Tensor? hidden_states_scale,
    Tensor(a!) order,
    *,
    SymInt tokens_per_rank,
    int num_experts,
    int ep_size,
    int invalid_expert_id=-1,
    Tensor? eplb_local_stats=None,
    Tensor? active_rank_mask=None,
    int timeout_sec=300,
    str comm) -> (Tensor hidden_states,
    Tensor topk_ids,
    Tensor topk_weights,
    Tensor hidden_states_scale,
    Tensor eplb_gathered_stats,
    Tensor routing)
moe_ep::dispatch_start(Tensor hidden_states,
    Tensor topk_ids,
    Tensor? topk_weights,
    Tensor? hidden_states_scale,
    Tensor(a!) order,
    *,
    SymInt tokens_per_rank,
    int num_experts,
    int ep_size,
    int invalid_expert_id=-1,
    Tensor? eplb_local_stats=None,
    Tensor? active_rank_mask=None,
    int timeout_sec=300,
    str comm) -> Tensor pending
moe_ep::dispatch_wait(Tensor hidden_states,
    Tensor topk_ids,
    Tensor? topk_weights,
    Tensor? hidden_states_scale,
    Tensor pending,
    Tensor? after,
    Tensor(a!) order,
    *,
    SymInt tokens_per_rank,
    int num_experts,
    int ep_size,
    int invalid_expert_id=-1,
    Tensor? eplb_local_stats=None,
    Tensor? active_rank_mask=None,
    int timeout_sec=300,
    str comm) -> (Tensor hidden_states,
    Tensor topk_ids,
    Tensor topk_weights,
    Tensor hidden_states_scale,
    Tensor eplb_gathered_stats,
    Tensor routing)""")


def test_tags() -> None:
    for op in OPS:
        tags = getattr(torch.ops.moe_ep, op).default.tags
        assert torch.Tag.needs_exact_strides in tags and torch.Tag.pt2_compliant_tag in tags


def test_the_version_is_stated_once() -> None:
    version = torch_moe_ep.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    stated = [
        str(path.relative_to(ROOT))
        for pattern in ("pyproject.toml", "setup.py", "torch_moe_ep/**/*.py", "csrc/**/*", "ops/*", "meta/*")
        for path in ROOT.glob(pattern)
        if path.is_file() and path.suffix != ".so" and f'"{version}"' in path.read_text(errors="ignore")
    ]
    assert stated == ["torch_moe_ep/version.py"]


def test_the_op_library_is_free_of_python() -> None:
    dynamic = subprocess.run(["readelf", "-d", torch_moe_ep.OP_LIBRARY], capture_output=True, text=True, check=True)
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic.stdout)
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed if "python" in name] == []
    symbols = subprocess.run(
        ["readelf", "--dyn-syms", "-W", torch_moe_ep.OP_LIBRARY], capture_output=True, text=True, check=True
    )
    undefined = re.findall(r"UND\s+(\S+)", symbols.stdout)
    assert undefined and [name for name in undefined if re.match(r"_?Py[A-Z_]", name)] == []


def test_the_op_library_loads_alone() -> None:
    """As a process that has none of our Python code does it."""
    program = (
        "import sys, torch; torch.ops.load_library(sys.argv[1]);"
        "print(torch.ops.moe_ep.dispatch.default._schema.name, 'torch_moe_ep' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, torch_moe_ep.OP_LIBRARY], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["moe_ep::dispatch", "False"]


def test_the_control_plane_needs_no_torch() -> None:
    dynamic = subprocess.run(["readelf", "-d", _C.__file__], capture_output=True, text=True, check=True)
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic.stdout)
    assert "libtorch_moe_ep.so" in needed and not any("torch_python" in name for name in needed)


def test_the_stub_names_what_the_control_plane_has() -> None:
    everywhere, cuda_only = (
        set(re.findall(r"^(?:def )?(\w+)[:(]", part, re.MULTILINE))
        for part in (ROOT / "torch_moe_ep" / "_C.pyi").read_text().split("# Only where has_cuda.")
    )
    expected = everywhere | (cuda_only if _C.has_cuda else set())
    assert {name for name in vars(_C) if not name.startswith("__")} == expected


def test_what_the_package_offers() -> None:
    for name in torch_moe_ep.__all__:
        assert hasattr(torch_moe_ep, name), name


def test_mutations_still_find_what_they_take_out() -> None:
    for mutation in MUTATIONS:
        for name, text, _ in mutation.edits:
            assert (ROOT / name).read_text().count(text) == 1, f"{mutation.name}: {name} has moved on"
