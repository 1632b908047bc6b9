"""A CUDA driver with logical endpoints for machines without a GPU (driver.cpp), and csrc/memory/logical_endpoint.h over
it (harness.cpp, compiled with the sources as they are, so that nothing need be built or installed)."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ALIGNMENT = 2 << 20  # of the fake driver, unless told otherwise
UNICAST_CLIQUE = 2
# The calls that the code under test cannot do without, in the order in which it looks for them.
CALLS = [
    "cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetAttribute", "cuGetErrorName", "cuDeviceGetCliqueCount",
    "cuDeviceGetCliqueInfo", "cuLogicalEndpointIdReserve", "cuLogicalEndpointIdRelease", "cuLogicalEndpointGetLimits",
    "cuLogicalEndpointCreate", "cuLogicalEndpointDestroy", "cuLogicalEndpointQuery", "cuLogicalEndpointBindMem",
    "cuLogicalEndpointUnbind", "cuLogicalEndpointExport", "cuLogicalEndpointImport",
]  # fmt: skip


class EndpointError(RuntimeError):
    """moe_ep::Error"""


class EndpointArgumentError(EndpointError):
    """moe_ep::ArgumentError"""


class Probe(NamedTuple):
    reason: str
    clique: int
    owner_access: bool


def build(directory: Path) -> None:
    """driver.so and harness.so in ``directory``."""
    # -Bsymbolic: the harness must not run the code of a library that the process has loaded.
    compiler = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++20", "-O0", "-fPIC", "-shared", "-Wl,-Bsymbolic"]
    endpoints = ROOT / "csrc" / "memory" / "logical_endpoint.cpp"
    for name, files in (("driver", [HERE / "driver.cpp"]), ("harness", [HERE / "harness.cpp", endpoints])):
        output = str(directory / f"{name}.so")
        subprocess.run([*compiler, "-Wall", f"-I{ROOT}", *map(str, files), "-o", output, "-ldl"], check=True)


class FakeDriver:
    """The driver: ``set(knob=value)``, ``fail_at``, what it saw and what it still holds. ``lib`` has the calls."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "driver.so"
        self.lib = ctypes.CDLL(str(self.path))
        for name in ("failed_call", "log", "violations", "held"):
            getattr(self.lib, f"fake_{name}").restype = ctypes.c_char_p
        self.lib.fake_create_memory.restype = ctypes.c_uint64
        self.lib.fake_free_memory.argtypes = [ctypes.c_uint64]

    def reset(self) -> None:
        """A device of capability 10.0 with all of it, in clique 7."""
        self.lib.fake_reset()
        self.add_clique(0, 3)
        self.add_clique(UNICAST_CLIQUE, 7)

    def set(self, **knobs: int) -> None:
        for name, value in knobs.items():
            self.lib.fake_set(name.encode(), ctypes.c_int64(value))

    def add_clique(self, kind: int, number: int) -> None:
        self.lib.fake_add_clique(kind, ctypes.c_uint32(number))

    def fail_at(self, n: int, result: int) -> None:
        self.lib.fake_fail_at(ctypes.c_int64(n), result)

    def create_memory(self, size: int, fabric: bool = True) -> int:
        return self.lib.fake_create_memory(ctypes.c_uint64(size), ctypes.c_bool(fabric))

    def free_memory(self, memory: int) -> None:
        self.lib.fake_free_memory(memory)

    def _lines(self, name: str) -> list[str]:
        return getattr(self.lib, f"fake_{name}")().decode().splitlines()

    @property
    def failed_call(self) -> str:
        return "".join(self._lines("failed_call"))

    @property
    def log(self) -> list[str]:
        return self._lines("log")

    @property
    def violations(self) -> list[str]:
        return self._lines("violations")

    @property
    def held(self) -> list[str]:
        return self._lines("held")


class Harness:
    def __init__(self, directory: Path, driver: FakeDriver) -> None:
        self.driver = driver
        self.lib = ctypes.CDLL(str(directory / "harness.so"))
        for name in ("text", "load", "probe", "occupied"):
            getattr(self.lib, f"harness_{name}").restype = ctypes.c_char_p

    def load(self, hidden: Sequence[str] = ()) -> str:
        return self.lib.harness_load(str(self.driver.path).encode(), " ".join(hidden).encode()).decode()

    def probe(self, device: int = 0, compiled: bool = True) -> Probe:
        clique, owner_access = ctypes.c_uint32(), ctypes.c_bool()
        reason = self.lib.harness_probe(
            device, ctypes.c_bool(compiled), ctypes.byref(clique), ctypes.byref(owner_access)
        )
        return Probe(reason.decode(), clique.value, owner_access.value)

    def check(self, status: int) -> None:
        if status:
            kind = {1: EndpointError, 2: EndpointArgumentError}[status]
            raise kind(self.lib.harness_text().decode())

    def endpoint_bytes(self, window_bytes: int, device: int = 0) -> int:
        out = ctypes.c_int64()
        self.check(self.lib.harness_bytes(device, ctypes.c_int64(window_bytes), ctypes.byref(out)))
        return out.value

    @property
    def occupied(self) -> str:
        return self.lib.harness_occupied().decode()


class Endpoints:
    """One rank's. ``shared``: beside others of this process."""

    def __init__(
        self, harness: Harness, memory: int, *, rank: int = 0, ep_size: int = 1, device: int = 0,
        window_bytes: int = ALIGNMENT, physical_bytes: int = ALIGNMENT, timeout_ms: int = 5000, shared: bool = True,
    ) -> None:  # fmt: skip
        self.harness, self.ep_size = harness, ep_size
        made = ctypes.c_void_p()
        harness.check(
            harness.lib.harness_open(
                device, rank, ep_size, ctypes.c_int64(window_bytes), ctypes.c_int64(physical_bytes),
                ctypes.c_uint64(memory), timeout_ms, ctypes.c_bool(shared), ctypes.byref(made),
            )
        )  # fmt: skip
        self.pointer = made

    def _call(self, name: str, *arguments: Any) -> None:
        self.harness.check(getattr(self.harness.lib, f"harness_{name}")(self.pointer, *arguments))

    def handle(self) -> bytes:
        out, size = ctypes.create_string_buffer(256), ctypes.c_int64()
        self._call("handle", out, ctypes.byref(size))
        return out.raw[: size.value]

    def connect(self, handles: Sequence[bytes]) -> None:
        sizes = (ctypes.c_int64 * len(handles))(*map(len, handles))
        self._call("connect", b"".join(handles), sizes, len(handles))

    def ids(self) -> list[int]:
        out = (ctypes.c_uint32 * self.ep_size)()
        self._call("ids", out)
        return list(out)

    def suspend(self) -> None:
        self._call("suspend")

    def resume(self, memory: int) -> None:
        self._call("resume", ctypes.c_uint64(memory))

    def close(self) -> None:
        self.harness.lib.harness_close(self.pointer)

    def keep_until_exit(self) -> None:
        self.harness.lib.harness_keep(self.pointer)
