# The control plane, ops/control.cpp: every function has its docstring and signature there.
from typing import Any

def __getattr__(name: str) -> Any: ...
