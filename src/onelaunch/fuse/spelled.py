"""Activations that a module writes out in elementary operations, as the transformers library does with its gelus.

The forward of such a module (no parameters, no children) is called with a proxy, and its expression compared with those of
known activations up to the order of sums and products. Eight launches become one.

An expression is the whole truth only where nothing else goes on, so the code is read before it is traced: it may name `torch`,
`math`, their arithmetic, numbers, and functions that pass the same test; no classes (`no_grad`, an autograd function), no
objects, nothing that writes. So it needs no more than a proxy; a change in place is one to that, too.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import math
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from onelaunch.activations import activate
from onelaunch.fuse.arguments import CONSTANTS
from onelaunch.fuse.proxies import TensorProxy
from onelaunch.fuse.readable import codes_of
from onelaunch.fuse.twin import sealed

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
    custom = not type(module).__module__.startswith("torch.nn") and not sealed(module)
    if not custom or module._modules or module._parameters or module._buffers or "forward" in vars(module):
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


def activated(x: torch.Tensor, name: str, module: nn.Module) -> torch.Tensor:
    """What `module` writes out. Unlike sums and products, activations are not defined for whole and complex numbers."""
    return activate(x, name) if torch.is_floating_point(x) else module(x)


def _recognised(module: nn.Module) -> str | None:
    try:
        if not _is_plain(module):
            return None
        expression = _expression(_graph_of(functools.partial(type(module).forward, module)))
    except Exception:  # whatever it is, it is not a plain expression
        return None
    return next((name for name, wanted in _spellings() if wanted == expression), None)


def _is_plain(module: nn.Module) -> bool:
    """Whether forward is a function of one argument whose code, with all it calls, names nothing but arithmetic."""
    kind = type(module)
    replaced = kind.__call__ is not nn.Module.__call__ or kind.__getattr__ is not nn.Module.__getattr__
    if replaced or len(inspect.signature(kind.forward).parameters) != 2:
        return False
    seen: set[Any] = set()
    left: list[Any] = [kind.forward]
    while left:
        named = left.pop()
        if isinstance(named, types.MethodType) and named.__self__ is module:
            named = named.__func__
        if named in seen or isinstance(named, CONSTANTS) or named in (torch, nn, nn.functional, math):
            continue
        if isinstance(named, types.BuiltinFunctionType) or named in _NAMES:
            if named not in _NAMES and named is not pow and named.__module__ != "math":
                return False
            continue
        if not isinstance(named, types.FunctionType) or hasattr(named, "__wrapped__"):
            return False
        seen.add(named)
        left += [cell.cell_contents for cell in named.__closure__ or ()]
        left += (*(named.__defaults__ or ()), *(named.__kwdefaults__ or {}).values())
        for name in _names(named):
            places = (
                named.__globals__,
                vars(builtins),
                vars(module),
                *map(vars, kind.__mro__[: -len(nn.Module.__mro__)]),
            )
            found = [place[name] for place in places if name in place]  # whichever of them it is
            if not found and name not in _ATTRIBUTES:
                return False
            left += found
    return True


# Names that code may read from `torch`, `math` or a tensor.
_ATTRIBUTES = frozenset(
    ("torch", "nn", "functional", *vars(math), *(getattr(known, "__name__", known) for known in _NAMES))
)
_WRITES = ("STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "DELETE_GLOBAL", "DELETE_ATTR", "DELETE_SUBSCR")


def _names(function: types.FunctionType) -> Iterator[str]:
    """The names of globals and attributes in its code; one that stands for nothing where something is written."""
    for code in codes_of(function):
        yield from code.co_names
        if any(instruction.opname in _WRITES for instruction in dis.get_instructions(code)):
            yield "a write"


def _spellings() -> list[tuple[str, Any]]:
    if not _spelled:
        _spelled.extend((name, _expression(_graph_of(spelling))) for name, spelling in SPELLINGS)
    return _spelled


class _Proxies(fx.proxy.GraphAppendingTracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return TensorProxy(node, self)


def _graph_of(function: Callable[[Any], Any]) -> fx.Graph:
    graph = fx.Graph()
    graph.output(function(_Proxies(graph).proxy(graph.placeholder("x"))).node)
    return graph


_spelled: list[tuple[str, Any]] = []


def _expression(graph: fx.Graph) -> Any:
    """The result as nested tuples, sums and products flat and sorted; only for a function of one input."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    if sum(node.op == "placeholder" for node in graph.nodes) != 1:
        raise ValueError("not a function of one input")
    if any(
        node.op in ("get_attr", "call_module") or (node.op[:5] == "call_" and node.target not in _NAMES)
        for node in graph.nodes
    ):
        raise ValueError("not arithmetic")  # what the result does not come from may still change what it comes from
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
