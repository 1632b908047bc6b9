"""Builds the two binaries of torch_moe_ep with ninja; everything else is in pyproject.toml.

* ``libtorch_moe_ep.so``, the op library: csrc, meta and ops. It is free of Python, so that ``torch.ops.load_library``
  and C++ programs (AOTInductor packages) can load it alone.
* ``_C``, the pybind11 control plane, linked against the former.

Own ninja rules instead of ``torch.utils.cpp_extension.BuildExtension``: that one wants a CUDA build of torch for
``.cu`` files, keeps no objects across editable installs, and names every library as a Python module.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import ninja
import pybind11
import torch
from ninja.ninja_syntax import Writer
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
OP_LIBRARY = "libtorch_moe_ep.so"
CONTROL = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
CUDA_ARCHITECTURES = ("90a", "100a")


def check_torch_version() -> None:
    wanted = re.search(r'"torch>=([0-9.]+),<([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert wanted is not None
    low, high, installed = (
        tuple(int(n) for n in re.findall(r"\d+", version)[:2]) for version in (*wanted.groups(), torch.__version__)
    )
    if not low <= installed < high:
        sys.exit(
            f"torch_moe_ep builds with torch >= {wanted[1]} and < {wanted[2]}; {sys.executable} has {torch.__version__}"
        )


def find_compiler() -> str:
    """$CXX or g++, or a sentence that says what is missing."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        sys.exit(f"torch_moe_ep: no C++ compiler: {compiler!r} is not on PATH; install g++ 11 or newer, or set CXX")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        sys.exit(f"torch_moe_ep: {header} is missing; install the headers of this Python (python3-dev or the like)")
    return compiler


def find_nvcc() -> str | None:
    """The CUDA compiler, or None: then the library is built without its CUDA column."""
    if os.environ.get("TORCH_MOE_EP_CUDA", "1") == "0":
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    beside = Path(home) / "bin" / "nvcc"
    nvcc = str(beside) if beside.exists() else shutil.which("nvcc")
    if nvcc is not None:
        known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
        missing = [a for a in CUDA_ARCHITECTURES if f"sm_{a.rstrip('a')}" not in known]
        if missing:
            sys.exit(
                f"torch_moe_ep: {nvcc} cannot compile for sm_{' and sm_'.join(missing)}; use CUDA 13 (CUDA_HOME=...), "
                "or build without the CUDA column: TORCH_MOE_EP_CUDA=0"
            )
    return nvcc


def quote(path: str | Path) -> str:
    return shlex.quote(str(path))


def sources(*rooms: str, suffix: str = ".cpp") -> list[Path]:
    return sorted(p for room in rooms for p in (ROOT / room).rglob(f"*{suffix}"))


def write_ninja_file(build_dir: Path) -> None:
    check_torch_version()
    compiler = find_compiler()
    nvcc = find_nvcc()
    cuda_sources = sources("csrc", suffix=".cu") if nvcc else []
    with open(build_dir / "build.ninja", "w") as file:
        n = Writer(file, width=160)
        # A sum rounds after every operation, as on a GPU: no fused multiply-add.
        flags = "-O3 -g0 -std=c++20 -ffp-contract=off -fPIC -Wall -Wextra -Wno-unused-parameter"
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        root = quote(ROOT)
        torch_includes = " ".join(f"-isystem {quote(p)}" for p in cpp_extension.include_paths())
        torch_libraries = quote(cpp_extension.library_paths()[0])
        n.rule("cxx", f"$cxx -MMD -MF $out.d {flags} -I{root} $extra -c $in -o $out", depfile="$out.d", deps="gcc",
               description="C++ $in")
        n.variable("cxx", compiler)
        n.rule("link", "$cxx -shared $in -o $out $extra", description="link $out")
        if nvcc:
            targets = " ".join(f"-gencode=arch=compute_{a},code=sm_{a}" for a in CUDA_ARCHITECTURES)
            n.rule("nvcc", f"{quote(nvcc)} -MD -MF $out.d -O3 -std=c++20 -lineinfo -Xcompiler -fPIC "
                           f"--expt-relaxed-constexpr {targets} -I{root} -c $in -o $out",
                   depfile="$out.d", deps="gcc", description="CUDA $in")

        def compile_all(paths: list[Path], extra: str, rule: str = "cxx") -> list[str]:
            outputs = []
            for path in paths:
                output = str(path.relative_to(ROOT)).replace("/", ".") + ".o"
                n.build(output, rule, str(path), variables={"extra": extra})
                outputs.append(output)
            return outputs

        cuda_flag = "-DMOE_EP_CUDA=1" if nvcc else ""
        cuda_home = Path(nvcc).resolve().parent.parent if nvcc else None
        cuda_include = f"-isystem {quote(cuda_home / 'include')}" if cuda_home else ""
        control = ROOT / "ops" / "control.cpp"
        op_sources = [p for p in sources("ops", "meta") if p != control]
        if not nvcc:
            op_sources = [p for p in op_sources if p.name != "cuda.cpp"]
        core_sources = [p for p in sources("csrc") if nvcc or "cuda" not in p.parts and "cuda" not in p.stem]
        objects = compile_all(core_sources, f"{abi} {cuda_flag} {cuda_include} -Wconversion")
        objects += compile_all(op_sources, f"{abi} {cuda_flag} {torch_includes}")
        objects += compile_all(cuda_sources, "", "nvcc")
        link = f"-Wl,-soname,{OP_LIBRARY} -L{torch_libraries} -ltorch -ltorch_cpu -lc10 -lrt -lpthread -ldl"
        if cuda_home:
            link += f" -L{quote(cuda_home / 'lib64')} -L{quote(cuda_home / 'lib')} -lcudart_static"
        n.build(OP_LIBRARY, "link", objects, variables={"extra": link})
        python = f"-isystem {quote(pybind11.get_include())} -isystem {quote(sysconfig.get_path('include'))}"
        objects = compile_all([control], f"{abi} {cuda_flag} {python}")
        n.build(CONTROL, "link", objects, implicit=[OP_LIBRARY],
                variables={"extra": f"-L. -l:{OP_LIBRARY} '-Wl,-rpath,$$ORIGIN'"})
        n.default([OP_LIBRARY, CONTROL])


class NinjaBuild(build_ext):
    """Runs ninja in build/<torch>-<python>/, where objects survive, and copies the two binaries to their place."""

    def run(self) -> None:
        build_dir = ROOT / "build" / f"torch{torch.__version__}-{sys.implementation.cache_tag}"
        build_dir.mkdir(parents=True, exist_ok=True)
        write_ninja_file(build_dir)
        jobs = os.environ.get("MAX_JOBS")
        command = [os.path.join(ninja.BIN_DIR, "ninja"), *(["-j", jobs] if jobs else [])]
        if subprocess.run(command, cwd=build_dir).returncode != 0:
            sys.exit("torch_moe_ep: the compilation failed; the lines above, from FAILED on, say where")
        for path in self.get_outputs():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            shutil.copyfile(build_dir / os.path.basename(path), path + ".new")
            os.replace(path + ".new", path)  # a running process keeps the file it has mapped

    def _package_dir(self) -> str:
        return str(ROOT / "torch_moe_ep") if self.inplace else os.path.join(self.build_lib, "torch_moe_ep")

    def get_outputs(self) -> list[str]:
        return [os.path.join(self._package_dir(), name) for name in (OP_LIBRARY, CONTROL)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    ext_modules=[Extension("torch_moe_ep._C", [])],  # makes the wheel platform-specific
    cmdclass={"build_ext": NinjaBuild},
)
