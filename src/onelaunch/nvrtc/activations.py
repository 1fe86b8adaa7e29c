"""The activations in CUDA C++: the constants that `activations.cuh` needs, and the names it implements."""

from __future__ import annotations

import re
from pathlib import Path

from onelaunch import activations

CONSTANTS = ("LEAKY_RELU_SLOPE", "SELU_SCALE", "SELU_ALPHA", "GELU_CUBIC", "SOFTPLUS_THRESHOLD")
_SPECIALISED = re.findall(r"struct Activation<(\w+)>", (Path(__file__).parent / "activations.cuh").read_text())
IMPLEMENTED = frozenset(name.lower() for name in _SPECIALISED) - {"none"}


def constants() -> str:
    """The lines that a translation unit needs before it includes `activations.cuh`."""
    kinds = ", ".join(name.upper() for name in ("none", *activations.ACTIVATIONS))
    floats = ", ".join(f"{name} = {getattr(activations, name)!r}f" for name in CONSTANTS)
    return f"enum {{ {kinds} }};\nconstexpr float {floats};"
