"""What is refused for the names and instructions in a forward's code, before it is traced."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from onelaunch.fuse.state import moves, reached

# Names in a forward's code that make it more than a function of its tensors, or that a proxy answers wrongly.
TELLING_NAMES = frozenset(
    {
        *("isinstance", "issubclass", "type", "is_tensor", "hasattr", "print", "warn"),
        # A graph records none of these, and some change nothing while it is recorded.
        *("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "checkpoint", "save_on_cpu"),
        *("manual_seed", "set_rng_state", "fork_rng", "enter_context", "__enter__"),
        # What they answer may be another thing at the next call.
        *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled"),
        "suppress",  # what raises for some tensors does not raise for proxies
    }
)
# Of these, the ones that a proxy refuses to answer (`proxies.py`): of other values anybody may ask them.
_PROXIES_COMPLAIN = frozenset({"isinstance", "issubclass", "hasattr"})


@dataclass(frozen=True)
class Reading:
    """What the code of one function says."""

    reason: str | None  # why a trace of it would not be the whole truth
    why_not_run: str | None  # the same, once it has been traced and no proxy has complained
    arguments: frozenset[tuple[str, bool]]  # compared with None as they come, or (True) of which an attribute is
    asks_for_none: bool  # whether it compares another value with None


@functools.lru_cache(maxsize=10_000)
def read(code: types.CodeType) -> Reading:
    arguments, others = _asked_for_none(code)
    found = _why_not_code(code)
    telling = sorted(TELLING_NAMES.intersection(code.co_names))
    left = [name for name in telling if name not in _PROXIES_COMPLAIN and (name != "type" or _calls_type(code))]
    reason, why_not_run = (f"calls {names[0]}" if names else found for names in (telling, left))
    return Reading(reason, why_not_run, arguments, others)


def _calls_type(code: types.CodeType) -> bool:
    """`type(x)`, not `x.device.type`."""
    return any(
        instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "type"
        for instruction in dis.get_instructions(code)
    )


def why_not_readable(module: nn.Module) -> str | None:
    """Why a trace of this module's forward, and of the methods it calls, would not be the whole truth."""
    for method in methods_of(type(module)):
        codes = list(codes_of(method))
        for reason in (read(code).reason for code in codes):
            if reason:
                return f"its forward {reason}"
        names = {name for code in codes for name in code.co_names}
        for name in sorted(names & vars(module).keys()):
            if any(moves(value) for _, value in reached({name: vars(module)[name]})):
                return f"its forward reads from an iterator or a random generator ({name})"
    return None


def methods_of(kind: type[nn.Module]) -> Iterator[types.FunctionType]:
    """The forward of a class and the methods whose names its code has, and theirs; not those of torch."""
    seen: set[str] = set()
    left = ["forward"]
    while left:
        name = left.pop()
        method = getattr(kind, name, None)
        if name in seen or not isinstance(method, types.FunctionType) or _of_torch(method):
            continue
        seen.add(name)
        yield method
        left += sorted({name for code in codes_of(method) for name in code.co_names})


def _of_torch(method: types.FunctionType) -> bool:
    return (method.__module__ or "").startswith("torch.")  # generated code has no module


def codes_of(method: types.FunctionType) -> Iterator[types.CodeType]:
    """The code of a function, of what a decorator wrapped and of the functions inside."""
    left: list[Any] = [method.__code__, getattr(inspect.unwrap(method), "__code__", None)]
    while left:
        code = left.pop()
        if isinstance(code, types.CodeType):
            yield code
            left += code.co_consts


def _why_not_code(code: types.CodeType) -> str | None:
    before = ""
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name == "CHECK_EXC_MATCH" or (before == "PUSH_EXC_INFO" and name == "POP_TOP"):
            return "catches exceptions"  # which tensors raise, and proxies do not
        if name.startswith("MATCH_"):
            return "matches the types of values"
        # A graph enters none, and a child that it calls as a whole may ask for what one sets.
        if name == "BEFORE_WITH" or (name == "LOAD_SPECIAL" and "__enter__" in instruction.argrepr):
            return "enters a context (with)"
        before = name
    found = assigned(code)
    for operands, _ in comparisons(code):
        last = [
            attributes[0] if attributes else found.get(variable or "", ("", 0))[0] for variable, attributes in operands
        ]
        if not _CONSTANT_OBJECTS.isdisjoint(last):
            return "compares a dtype with `is`"
        variables = [variable for variable, attributes in operands if variable and not attributes]
        if len(variables) == 2 and not found.keys().isdisjoint(variables):
            return "compares values with `is`"  # `x.contiguous()` is x, or is not
    return None


_CONSTANT_OBJECTS = frozenset({"dtype", "layout"})  # attributes of a tensor that people compare with `is`


def _asked_for_none(code: types.CodeType) -> tuple[frozenset[tuple[str, bool]], bool]:
    """The arguments that the code compares with None before it assigns them, and whether it compares something else."""
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = assigned(code)
    loops = any(instruction.opname.startswith("JUMP_BACKWARD") for instruction in dis.get_instructions(code))
    arguments = set()
    others = False
    for operands, offset in comparisons(code):
        for variable, attributes in operands:
            first = found.get(variable or "", ("", sys.maxsize))[1]
            if variable in given and (offset < first if not loops else first == sys.maxsize):
                arguments.add((variable, bool(attributes)))
            elif variable is None or first < sys.maxsize:
                others = True
    return frozenset(arguments), others


Operand = tuple[
    str | None, list[str]
]  # a local variable ("": a constant or a global, None: any other value), its attributes


def comparisons(code: types.CodeType) -> Iterator[tuple[list[Operand], int]]:
    """What each `is` in the code compares, the last attribute of each first, and where it stands."""
    loads: list[tuple[str, str]] = []
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name.startswith("LOAD_FAST"):
            loads += [("variable", variable) for variable in _variables(instruction)]
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            loads.append(("attribute", str(instruction.argval)))
        elif name in ("LOAD_CONST", "LOAD_GLOBAL"):
            loads.append(("", ""))
        else:
            if name == "IS_OP" or name.endswith("_NONE"):
                yield [_operand(loads) for _ in range(2 if name == "IS_OP" else 1)], instruction.offset
            loads = []


def _operand(loads: list[tuple[str, str]]) -> Operand:
    attributes = []
    while loads and loads[-1][0] == "attribute":
        attributes.append(loads.pop()[1])
    return (loads.pop()[1] if loads else None), attributes


def assigned(code: types.CodeType) -> dict[str, tuple[str, int]]:
    """The local variables that the code assigns something but constants, each with the attribute it is, if it is one, and
    where that happens first."""
    found: dict[str, tuple[str, int]] = {}
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("STORE_FAST") and before is not None and before.opname != "LOAD_CONST":
            attribute = str(before.argval) if before.opname == "LOAD_ATTR" else ""
            for variable in _variables(instruction):
                found[variable] = attribute, found.get(variable, ("", instruction.offset))[1]
        if instruction.opname != "COPY" and not instruction.opname.startswith("STORE_FAST"):  # a = b = None
            before = instruction
    return found


def _variables(instruction: dis.Instruction) -> tuple[str, ...]:
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
