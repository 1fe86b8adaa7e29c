"""What is refused for the names and instructions in a forward's code, before it is traced."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from onelaunch.fuse.state import moves, reached

# Names in a forward's code that make it more than a function of its tensors, or that a proxy answers wrongly.
TELLING_NAMES = frozenset(
    {
        *("isinstance", "issubclass", "type", "is_tensor", "hasattr", "print", "warn"),
        # A graph records none of these, and some change nothing while it is recorded.
        *("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "checkpoint", "save_on_cpu"),
        *("manual_seed", "set_rng_state", "fork_rng"),
        # What they answer may be another thing at the next call.
        *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled"),
        "suppress",  # what raises for some tensors does not raise for proxies
    }
)


def why_not_readable(module: nn.Module) -> str | None:
    """Why a trace of this module's forward, and of the methods it calls, would not be the whole truth."""
    for method in methods_of(type(module)):
        codes = list(codes_of(method))
        names = {name for code in codes for name in code.co_names}
        telling = sorted(names & TELLING_NAMES)
        if telling:
            return f"its forward calls {telling[0]}"
        for code in codes:
            reason = _why_not_code(code)
            if reason:
                return f"its forward {reason}"
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
        before = name
    found = assigned(code)
    for operands in comparisons(code):
        last = [attributes[0] if attributes else found.get(variable) for variable, attributes in operands]
        if not _CONSTANT_OBJECTS.isdisjoint(last):
            return "compares a dtype with `is`"
        variables = [variable for variable, attributes in operands if variable and not attributes]
        if len(variables) == 2 and not found.keys().isdisjoint(variables):
            return "compares values with `is`"  # `x.contiguous()` is x, or is not
    return None


_CONSTANT_OBJECTS = frozenset({"dtype", "layout"})  # attributes of a tensor that people compare with `is`


def asks_for_none(module: nn.Module) -> bool:
    """Whether the forward compares a value that it did not get as an argument with None."""
    return any(
        variable in assigned(code) and not attributes
        for method in methods_of(type(module))
        for code in codes_of(method)
        for operands in comparisons(code)
        for variable, attributes in operands
    )


def comparisons(code: types.CodeType) -> Iterator[list[tuple[str, list[str]]]]:
    """What each `is` in the code compares: local variables ("": something else) and their attributes, the last first."""
    loads: list[tuple[str, str]] = []
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name.startswith("LOAD_FAST"):
            loads += [("variable", variable) for variable in _variables(instruction)]
        elif name.startswith("LOAD_"):
            loads.append(("attribute" if name in ("LOAD_ATTR", "LOAD_METHOD") else "", str(instruction.argval)))
        else:
            if name == "IS_OP" or name.endswith("_NONE"):
                yield [_operand(loads) for _ in range(2 if name == "IS_OP" else 1)]
            loads = []


def _operand(loads: list[tuple[str, str]]) -> tuple[str, list[str]]:
    attributes = []
    while loads and loads[-1][0] == "attribute":
        attributes.append(loads.pop()[1])
    kind, name = loads.pop() if loads else ("", "")
    return (name if kind == "variable" else ""), attributes


def assigned(code: types.CodeType) -> dict[str, str]:
    """The local variables that the code assigns something but constants, each with the attribute it is, if it is one."""
    found: dict[str, str] = {}
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("STORE_FAST") and before is not None and before.opname != "LOAD_CONST":
            attribute = str(before.argval) if before.opname == "LOAD_ATTR" else ""
            found |= dict.fromkeys(_variables(instruction), attribute)
        if instruction.opname != "COPY" and not instruction.opname.startswith("STORE_FAST"):  # a = b = None
            before = instruction
    return found


def _variables(instruction: dis.Instruction) -> tuple[str, ...]:
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
