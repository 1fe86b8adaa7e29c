"""What a recording depends on beside its arguments, and whether it may be replayed.

A recording reads nothing of Python again. Dynamo knows what the code of a function has read, and checks it by guards before
each call of the compiled code. Here the same guards are checked from outside. They say nothing of which tensor is read or where
its memory is, so the tensors are found by the names that Dynamo has for them, and compared as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.guards import TensorGuards
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onelaunch.capture.dynamo import compile_by, plain_break, without_dynamo_warnings, without_log_breaks
from onelaunch.capture.named_inputs import NamedInputs, in_plain_words, keeping_names, name_of, name_of_source

Contexts = Sequence[Callable[[], contextlib.AbstractContextManager[Any]]]
OURS = f"{Path(__file__).parents[1]}{os.sep}"
GONE = (AttributeError, KeyError, IndexError, TypeError)  # what the code has read is not there any more
# Dynamo may look into what is better not compiled; and a number that changes is a constant of each trace.
TRACED_TOO: dict[str, Any] = {
    "allow_rnn": True, "trace_autograd_ops": True, "specialize_float": True,
    "reorderable_logging_functions": {warnings.warn, print},
}  # fmt: skip
RESET = "what torch.compile knows of the step"  # by `torch.compiler.reset`, or as an object that it knew is gone
# Of Dynamo's guards, the name of what they check.
NAME = r"[GL]\['[^']+'\](?:\.\w+|\[[^\]]+\])*"
ATTRIBUTES = (
    (rf"dict\(type\(({NAME})\)\.__dict__\)\['(\w+)'\]", r"\1.\2"),
    (rf"___dict_contains\('(\w+)', ({NAME})\.__dict__\)", r"\2.\1"),
)
# What an expression reads last, an attribute or an item, and of what.
LAST_LOOKUP = r"(.+?)(\.\w+|\['[^']*'\]|\[\d+\])"
CLOSURE = rf"({NAME})\.__closure__\[(\d+)\]\.cell_contents"


class Dependencies:
    """What the code of one call has read, beside its arguments.

    scope: the local variables of the code, with those of functions around it; `args` and `kwargs` are the arguments, and a
    recording has its own. Tensors on `device` are compared by identity and memory; whatever else the graph reads, such as a
    number or a tensor on the host, by its value. Raises NameError for numbers that Dynamo draws on the host.
    """

    def __init__(
        self, manager: Any, scope: dict[str, Any], variables: dict[str, Any], names: Iterable[str],
        device: torch.device, contexts: Contexts = (),
    ) -> None:  # fmt: skip
        self._manager, self._scope, self._variables, self._contexts = manager, scope, variables, contexts
        self._known: dict[str, Any] = {"is_equal": _is_equal, "hooks_of": _hooks_of}
        self._check: Callable[[Any], bool] = manager.root.check
        names = [name for name in names if not _is_argument(name)]
        read = self._evaluated(f"lambda L: [{', '.join(names)}]")
        found = dict(zip(names, zip(read(scope), read(scope), strict=True), strict=True))
        self.tensors: dict[str, torch.Tensor] = {
            name: one for name, (one, same) in found.items()
            if one is same and isinstance(one, torch.Tensor) and one.device == device
        }  # fmt: skip
        self._places = {name: self._same_place(name, one) for name, one in self.tensors.items()}
        values = {name: one for name, (one, _) in found.items() if name not in self.tensors}
        # By name: what must be true, as an expression. One function for all is several times as fast as loops.
        self._parts = {name: self._same_tensor(name, one) for name, one in self.tensors.items()}
        self._parts |= {name: self._same_value(name, one) for name, one in values.items()}
        self._kinds = _Kinds([one for one in self.tensors.values() if has_address(one)])
        self._reads_same: Callable[[dict[str, Any]], bool] = self._defined(self._parts)

    def hold(self) -> bool:
        """Whether the code would read the same again. This is called before every replay, so it is fast."""
        if self._manager.cache_entry is None:
            return False
        if self._contexts:
            with inside(self._contexts):
                return self._holds_inside()
        return self._holds_inside()

    def _holds_inside(self) -> bool:
        try:
            return self._check(self._scope) and self._reads_same(self._scope) and self._kinds.hold()
        except GONE:
            return False

    def has_its_tensors(self) -> bool:
        """Whether the tensors that were read are still there: with others it will not hold again."""
        return not any(map(self._is_elsewhere, self.tensors))

    def change(self) -> str:
        """What the code would read differently now, in words; empty if nothing."""
        if self._manager.cache_entry is None:
            return RESET
        with inside(self._contexts):
            checked = self._manager.check_verbose(self._scope)
            if not checked.result:
                return self._words(" ".join(checked.verbose_code_parts))
            names = [name for name in self._parts if self._differs(name)]
            changed = [] if names or self._kinds.hold() else self._kinds.changed()
        names += [name for name, one in self.tensors.items() if any(one is other for other in changed)]
        return self._words(names[0]) if names else ""

    def _differs(self, name: str) -> bool:
        return not self._is_true(self._parts[name])

    def _is_elsewhere(self, name: str) -> bool:
        return not self._is_true(self._places[name])

    def _is_true(self, expression: str) -> bool:
        try:
            return bool(self._evaluated(f"lambda L: {expression}")(self._scope))
        except GONE:
            return False

    def _same_tensor(self, name: str, tensor: torch.Tensor) -> str:
        """The same object at the same address, with the same hooks, and of the same type, shape and so on."""
        parts = [self._places[name]]
        if any(hooks := _hooks_of(tensor)):
            parts.append(f"hooks_of(t) == {self._keep(hooks)}")
        elif tensor.requires_grad:  # no other tensor has any
            parts.append("not t._backward_hooks and not t._post_accumulate_grad_hooks")
        if not has_address(tensor):
            parts.append(f"{'' if tensor.requires_grad else 'not '}t.requires_grad")
        return " and ".join(parts)

    def _same_place(self, name: str, tensor: torch.Tensor) -> str:
        place = f" and t.data_ptr() == {tensor.data_ptr()}" if has_address(tensor) else ""
        return f"(t := {name}) is {self._keep(tensor)}{place}"

    def _same_value(self, name: str, value: Any) -> str:
        return f"is_equal({name}, {self._keep(value.detach().clone() if isinstance(value, torch.Tensor) else value)})"

    def _keep(self, value: Any) -> str:
        """A name for a value in expressions."""
        name = f"known_{len(self._known)}"
        self._known[name] = value
        return name

    def _evaluated(self, expression: str) -> Callable[[dict[str, Any]], Any]:
        """A function of Dynamo's `L`, in whose expressions are Dynamo's names and those that are kept here."""
        return eval(expression, self._names())

    def _defined(self, parts: dict[str, str]) -> Callable[[dict[str, Any]], bool]:
        """Whether all parts are true, as one function of `L` that looks up each layer of a model once."""
        lines: dict[str, str] = {}  # the variable of each expression that others begin with

        def shortened(name: str) -> str:
            """`v7['weight']`"""
            if not (found := re.fullmatch(LAST_LOOKUP, name)) or found[1] in ("L", "G"):
                return name
            owner, lookup = found.groups()
            if owner not in lines:
                short = shortened(owner)  # whose own variables come first
                lines[owner] = f"v{len(lines)} = {short}"
            return f"{lines[owner].partition(' ')[0]}{lookup}"

        found = [part.replace(name, shortened(name), 1) for name, part in parts.items()]
        body = [*lines.values(), f"return {' and '.join(found) or True}"]
        variables = self._names()
        exec("\n    ".join(["def reads_same(L):", *body]), variables)
        return variables["reads_same"]

    def _names(self) -> dict[str, Any]:
        return {**self._manager.closure_vars, **self._known, "G": self._variables}

    def _words(self, text: str) -> str:
        """What a guard is about, or a name of Dynamo's: `model[3].factor` of `L['model']._modules['3'].factor == 1.0`."""
        for expression, words in ATTRIBUTES:
            text = re.sub(expression, words, text)
        while closure := re.search(CLOSURE, text):
            try:
                function = self._evaluated(f"lambda L: {closure[1]}")(self._scope)
            except (SyntaxError, *GONE):  # of a name inside which there is code, as of a dict's key
                break
            text = f"G['{function.__code__.co_freevars[int(closure[2])]}']{text[closure.end() :]}"
        found = re.search(NAME, text)
        return in_plain_words(found.group()) if found else "a setting of PyTorch"


class _Kinds:
    """Type, shape, strides and `requires_grad` of tensors, in one call: most of them can change in place."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._all = _kinds_of(tensors)
        self._each = [_kinds_of([one]) for one in tensors]

    def hold(self) -> bool:
        return self._all.check(*self._tensors)

    def changed(self) -> list[torch.Tensor]:
        """Those that differ."""
        return [one for one, kind in zip(self._tensors, self._each, strict=True) if not kind.check(one)]


def _kinds_of(tensors: list[torch.Tensor]) -> Any:
    sizes: Any = [[*one.shape] for one in tensors]
    strides: Any = [[*one.stride()] for one in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def inside(contexts: Contexts) -> contextlib.ExitStack:
    """All of these contexts, entered."""
    stack = contextlib.ExitStack()
    for context in contexts:
        stack.enter_context(context())
    return stack


def dependencies_of(
    compiled: Callable[..., Any], scope: dict[str, Any], device: torch.device, contexts: Contexts = ()
) -> Dependencies | None:
    """Of the code that a call with these arguments would run; None where it is not compiled, or not as a whole.

    compiled: what `compile_by` returned for a function and a backend that keeps names. scope: the arguments by their names.
    """
    function: FunctionType = _original(compiled)
    scope = {**scope, **_closure(function)}
    entry = _entry(function, scope)
    if entry is None:
        return None
    parts = [name for name in entry.code.co_names if name.startswith(("__compiled_fn", "__resume_at"))]
    graph = _original(function.__globals__.get(parts[0])) if len(parts) == 1 else None
    if (
        not isinstance(graph, NamedInputs)
        or not graph.is_whole
        or any(name.startswith("random_value") for name in graph.names)
    ):
        return None
    guards = [one for one in entry.guard_manager.code_parts if not one.startswith("___check_type_id")]
    counters = {name for name in graph.returned if not any(name in guard for guard in guards)}
    names = [name for name in graph.names if name not in counters]
    return Dependencies(entry.guard_manager, scope, function.__globals__, names, device, contexts)


def is_compiled(compiled: Callable[..., Any], scope: dict[str, Any]) -> bool:
    """Whether a further call with these arguments would compile nothing: Dynamo has code for it, or has given up."""
    function: FunctionType = _original(compiled)
    return not _entries(function) or _entry(function, {**scope, **_closure(function)}) is not None


def forms_of(compiled: Callable[..., Any]) -> int:
    """How many times Dynamo has compiled a function."""
    return len(_entries(_original(compiled)))


def _entry(function: FunctionType, scope: dict[str, Any]) -> Any:
    """The code that Dynamo would run."""
    return next((one for one in _entries(function) if one.guard_manager.check(scope)), None)


def _entries(function: FunctionType) -> list[Any]:
    return torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)


class _Traced(Exception):
    """Dynamo has captured the function: its graph need not run."""


class Trace:
    """Finds the dependencies of a function that is not compiled, or not as a whole. Dynamo reads it, and nothing runs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._traced = self._untraced()
        self.reason = ""  # why there are none

    def dependencies(self, scope: dict[str, Any], device: torch.device, contexts: Contexts = ()) -> Dependencies | None:
        """Of a call with these arguments, by their names; None, with `reason` set, where Dynamo cannot tell."""
        try:
            with without_log_breaks(), without_dynamo_warnings(), torch._dynamo.config.patch(TRACED_TOO):
                try:
                    self._traced(**scope)
                except torch._dynamo.exc.FailOnRecompileLimitHit:
                    self._traced = self._untraced()
                    self._traced(**scope)
        except _Traced:
            found = dependencies_of(self._traced, scope, device, contexts)
            self.reason = "" if found else "random numbers are drawn on the host"
            return found
        except Exception as error:  # Dynamo's own, whatever it could not read
            self.reason = plain_break(str(error)) + _place_in(str(error))
        return None

    def _untraced(self) -> Callable[..., Any]:
        compared: set[str] = set()

        def stop(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            names = map(name_of, gm.graph.find_nodes(op="placeholder"))
            compared.update(name for name in names if not _is_argument(name))
            return _stop

        def are_needed(guards: Sequence[Any]) -> list[bool]:
            """Not those of the tensors that are compared here: it halves the time."""
            return [
                one.guard_type != "TENSOR_MATCH" or name_of_source(one.orig_guard.originating_source) not in compared
                for one in guards
            ]

        options = {"guard_filter_fn": are_needed}
        return compile_by(keeping_names(stop), self._function, fullgraph=True, options=options)


def _stop(*args: Any) -> Any:
    raise _Traced


def _place_in(message: str) -> str:
    """` (model.py:14)`: the innermost place in a message of Dynamo's."""
    places = re.findall(r'File "([^"]+)", line (\d+)', message.partition("from user code")[2])
    places = [place for place in places if not place[0].startswith(OURS)]
    return f" ({Path(places[-1][0]).name}:{places[-1][1]})" if places else ""


def has_address(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and not (is_traceable_wrapper_subclass(tensor) or is_lazy(tensor))


def _is_argument(name: str) -> bool:
    return name.startswith(("L['args']", "L['kwargs']"))


def _closure(function: FunctionType) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _original(function: Any) -> Any:
    """The function that Dynamo has wrapped."""
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    return function


def _hooks_of(tensor: torch.Tensor) -> list[dict[int, Any] | None]:
    """Its hooks, by their numbers."""
    return [dict(hooks) if hooks else None for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]


def _is_equal(value: Any, known: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor):
        return value.dtype is known.dtype and torch.equal(value, known)
    return type(value) is type(known) and bool(value == known or (value != value and known != known))
