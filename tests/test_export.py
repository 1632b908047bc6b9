"""torch.export, and AOTInductor packages that run without our Python: in a Python process and in a C++ program."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import Rank, RankPool
from tiny_model import (
    CAPACITY,
    EXPERTS,
    HIDDEN,
    INNER,
    PATIENCE,
    TOP_K,
    Layer,
    make_model,
    open_group,
    route,
    run_experts,
    tokens,
)
from torch.export import Dim
from torch.utils import cpp_extension

import torch_moe_ep
from torch_moe_ep import MoEEpCommParams

ROOT = Path(torch_moe_ep.__file__).parent.parent
TOKENS = {"x": {0: Dim("tokens", max=CAPACITY)}}


# --- torch.export ---------------------------------------------------------------------------------------------------


def export_save_load_run(rank: Rank, strict: bool) -> None:
    groups = [open_group(rank.rank, rank.world_size, rank.device.type, namespace=name) for name in ("", "b")]
    layers = make_model(groups)
    # A module whose forward names its argument, for dynamic_shapes.
    model = Wrapped(layers)
    exported = torch.export.export(model, (tokens(5, device=rank.device),), dynamic_shapes=TOKENS, strict=strict)
    assert not any(name.endswith("order") for name in exported.state_dict)
    assert set(exported.graph_signature.non_persistent_buffers) >= {"layers.0.order", "layers.1.order"}
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    with torch.no_grad():
        for count in (5, 12, CAPACITY - 1):
            x = tokens(count + rank.rank, rank.rank, device=rank.device)
            torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)
    for group in groups:
        group.destroy()


class Wrapped(torch.nn.Module):
    def __init__(self, layers: torch.nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("strict", [False, True])
def test_export_save_load_run(ranks: Callable[[int], RankPool], strict: bool) -> None:
    ranks(2).run(export_save_load_run, strict, timeout=PATIENCE)


# --- AOTInductor ----------------------------------------------------------------------------------------------------


class ServedLayer(Layer):
    """A layer whose experts come as arguments, so that one package serves every rank."""

    def forward(self, x: torch.Tensor, local: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        ids, weights = route(x, self.router)
        got = torch_moe_ep.dispatch(self, x, ids, weights)
        y = run_experts(got.hidden_states, got.topk_ids, got.topk_weights, local, up, down)
        return x + torch_moe_ep.combine(self, y, got.routing, num_tokens=x.shape[0])


RANKS = 2
COMM = "served"


def arguments_of(rank: int) -> tuple[ServedLayer, tuple[torch.Tensor, ...]]:
    """The layer, and what it takes on a rank."""
    params = MoEEpCommParams(EXPERTS, TOP_K, CAPACITY, HIDDEN, dtype=torch.float32)
    group = SimpleNamespace(
        comm=COMM, ep_size=RANKS, params=params, order=torch.zeros(1), local_experts=params.local_experts(rank, RANKS)
    )
    layer = ServedLayer(group, 0)
    return layer, (tokens(7 + 5 * rank, rank), layer.local, layer.up.detach(), layer.down.detach())


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layer of 2 ranks, for any number of tokens; no communicator is open while it is traced and compiled."""
    layer, arguments = arguments_of(0)
    exported = torch.export.export(layer, arguments, dynamic_shapes=TOKENS | {"local": None, "up": None, "down": None})
    path = tmp_path_factory.mktemp("package") / "layer.pt2"
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The inputs of every rank, as tests/aoti_loader/main.cpp reads them."""
    for rank in range(RANKS):
        _, arguments = arguments_of(rank)
        for name, tensor in zip(("x", "local", "up", "down"), arguments, strict=True):
            tensor.numpy().tofile(tmp_path / f"{name}.{rank}")
        sizes = (arguments[0].shape[0], HIDDEN, len(arguments[1]), INNER, CAPACITY, TOP_K)
        (tmp_path / f"shape.{rank}").write_text(" ".join(map(str, sizes)))
    return tmp_path


def serve(command: list[str], package: Path, directory: Path) -> None:
    """Runs the command on every rank and compares what it writes with the same layer in this process, all experts
    local."""
    processes = [
        subprocess.Popen(
            [*command, str(package), str(directory), COMM, str(rank), str(RANKS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=directory,
        )  # fmt: skip
        for rank in range(RANKS)
    ]
    try:
        replies = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(replies)
    assert [reply.splitlines()[-1] for reply in replies] == ["2 rounds"] * RANKS
    everything = [arguments_of(rank) for rank in range(RANKS)]
    local, up, down = (torch.cat(parts) for parts in zip(*[arguments[1:] for _, arguments in everything], strict=True))
    for rank, (layer, (x, *_)) in enumerate(everything):
        got = torch.from_numpy(np.fromfile(directory / f"out.{rank}", np.float32)).view(-1, HIDDEN)
        with torch.no_grad():
            ids, weights = route(x, layer.router)
            expected = x + run_experts(x, ids.int(), weights, local, up, down)
        torch.testing.assert_close(got, expected)


# What tests/aoti_loader/main.cpp does, with the op library and the control plane alone.
PYTHON_LOADER = """
import importlib.util, os, sys, time
import numpy as np, torch
from pathlib import Path

op_library, control_plane, package, directory, comm, rank, world_size = sys.argv[1:]
directory, rank, world_size = Path(directory), int(rank), int(world_size)
torch.ops.load_library(op_library)
spec = importlib.util.spec_from_file_location("_C", control_plane)
control = importlib.util.module_from_spec(spec)
spec.loader.exec_module(control)

def gather(name, own):
    new = directory / f"{name}.{rank}.new"
    new.write_bytes(own)
    new.rename(directory / f"{name}.{rank}")
    paths = [directory / f"{name}.{peer}" for peer in range(world_size)]
    while not all(path.exists() for path in paths):
        time.sleep(0.001)
    return [path.read_bytes() for path in paths]

def tensor(name, dtype, *sizes):
    return torch.from_numpy(np.fromfile(directory / f"{name}.{rank}", dtype)).view(sizes)

T, H, L, F, C, K = map(int, (directory / f"shape.{rank}").read_text().split())
handle = control.open(
    name=comm, rank=rank, ep_size=world_size, device="cpu", device_index=0, memory="shm", pdl=False,
    enable_rank_mask=False, max_tokens=C, max_top_k=K, eplb_experts=0, weight_itemsize=4,
    dispatch_row_bytes=H * 4, combine_row_bytes=H * 4)
control.connect(comm, gather("handle", handle))
gather("connected", b"")
control.seal(comm)
out = torch._inductor.aoti_load_package(package)(
    tensor("x", np.float32, T, H), tensor("local", np.int32, L), tensor("up", np.float32, L, H, F),
    tensor("down", np.float32, L, F, H))
out.numpy().tofile(directory / f"out.{rank}")
assert not any(name.split(".")[0] == "torch_moe_ep" for name in sys.modules)
print(control.describe(comm)["rounds"], "rounds")
control.close(comm)
"""


def test_package_runs_in_python_without_our_package(package: Path, directory: Path) -> None:
    control_plane = torch_moe_ep._C.__file__
    serve([sys.executable, "-c", PYTHON_LOADER, torch_moe_ep.OP_LIBRARY, control_plane], package, directory)


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/aoti_loader/main.cpp, compiled and linked with torch and the op library."""
    program = tmp_path_factory.mktemp("loader") / "aoti_loader"
    libraries = [*cpp_extension.library_paths(), str(Path(torch_moe_ep.OP_LIBRARY).parent)]
    subprocess.run(
        [
            "g++", "-std=c++20", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            str(Path(__file__).parent / "aoti_loader" / "main.cpp"), "-o", str(program), f"-I{ROOT}",
            *[f"-isystem{path}" for path in cpp_extension.include_paths()],
            *[flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")],
            "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-l:" + Path(torch_moe_ep.OP_LIBRARY).name,
        ],
        check=True,
    )  # fmt: skip
    return program


def test_package_runs_in_a_program_without_python(package: Path, directory: Path, loader: Path) -> None:
    linked = subprocess.run(["ldd", str(loader)], capture_output=True, text=True, check=True).stdout
    assert "libtorch_moe_ep.so" in linked and "libpython" not in linked and "libtorch_python" not in linked
    serve([str(loader)], package, directory)
