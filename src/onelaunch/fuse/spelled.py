"""Activations that a module writes out in elementary operations, as the transformers library does with its gelus.

Such a module (no parameters, no children) is traced by itself, and its expression compared with those of known activations up
to the order of sums and products. Eight launches become one.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

_COMMUTATIVE = ("add", "mul")
_NAMES: dict[Any, str] = {
    operator.add: "add", torch.add: "add", "add": "add",
    operator.mul: "mul", torch.mul: "mul", torch.multiply: "mul", "mul": "mul",
    operator.pow: "pow", torch.pow: "pow", "pow": "pow",
    operator.truediv: "div", torch.div: "div", "div": "div",
    torch.tanh: "tanh", nn.functional.tanh: "tanh", "tanh": "tanh",
    torch.sigmoid: "sigmoid", nn.functional.sigmoid: "sigmoid", "sigmoid": "sigmoid",
    torch.erf: "erf", "erf": "erf",
}  # fmt: skip
ROOT = math.sqrt(2 / math.pi)
SPELLINGS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3))))),
    ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh(x * ROOT * (1 + 0.044715 * x * x)))),
    ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
    ("silu", lambda x: x * torch.sigmoid(x)),
)
_known: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, Any], str | None]] = weakref.WeakKeyDictionary()


def spelled_activation(module: nn.Module) -> str | None:
    """The activation that this module writes out, or None."""
    custom = not type(module).__module__.startswith("torch.nn") and not isinstance(module, torch.jit.ScriptModule)
    if not custom or module._modules or module._parameters or module._buffers:
        return None
    attributes = dict(vars(module))
    known = _known.get(module)
    if (
        known is None
        or known[0].keys() != attributes.keys()
        or any(known[0][k] is not v for k, v in attributes.items())
    ):
        known = attributes, _recognised(module)
        _known[module] = known
    return known[1]


def _recognised(module: nn.Module) -> str | None:
    try:
        expression = _expression(fx.Tracer().trace(module))
    except Exception:  # whatever it is, it is not a plain expression
        return None
    return next((name for name, wanted in _spellings() if wanted == expression), None)


def _spellings() -> list[tuple[str, Any]]:
    if not _spelled:
        _spelled.extend((name, _expression(fx.Tracer().trace(spelling))) for name, spelling in SPELLINGS)
    return _spelled


_spelled: list[tuple[str, Any]] = []


def _expression(graph: fx.Graph) -> Any:
    """The result as nested tuples, sums and products flat and sorted; only for a function of one input."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    if sum(node.op == "placeholder" for node in graph.nodes) != 1:
        raise ValueError("not a function of one input")
    return _tree(output.args[0])


def _tree(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return ("number", float(f"{value:.12g}"))
    if not isinstance(value, fx.Node) or value.kwargs:
        raise ValueError("not an expression")
    if value.op == "placeholder":
        return ("x",)
    name = _NAMES[value.target]
    parts = [_tree(argument) for argument in value.args]
    if name in _COMMUTATIVE:
        flat = [inner for part in parts for inner in (part[1:] if part[0] == name else (part,))]
        return (name, *sorted(flat, key=repr))
    return (name, *parts)
