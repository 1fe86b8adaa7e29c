"""What two sweeps must have in common for one to continue the other in its checkpoint folder.

A function counts by its name, its code and the plain values it is bound to, a loss module by its settings and tensors. So a
function that computes something else is another one, though it has the same name. `make_model` does not count, only the first
model that it makes: a folder may continue with one that was mended for the candidates that failed.
"""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.sweep.member import Member
from onelaunch.sweep.runs import MemberRuns
from onelaunch.train.checkpoint import checksum, fingerprint

PLAIN = (type(None), bool, int, float, complex, str, bytes)


def identity_of(
    members: Sequence[Member], options: Mapping[str, Any], strategy: str, metric: str, runs: MemberRuns, trial: Run
) -> dict[str, Any]:
    """By name of what may differ, as JSON values. `trial`: the Run of the first member that can be trained."""
    held = (*(trial.validation or ()), *trial.more_validation_x)
    data = runs.tensors
    return {
        "grid": [f"{m.seed} {m.split} {_described(m.parameters)}" for m in members],
        "options": _described(options),
        "strategy": f"{strategy} {metric}"
        if strategy == "halving"
        else strategy,  # there the metric decides who goes on
        "folds": f"{checksum(runs.splits.given()):08x}",
        "validation": f"{checksum(held):08x}" if held else "",
        "model": str(trial.model),
        "weights": f"{checksum(trial.model.state_dict().values()):08x}",
        "data": f"{[list(each.shape) for each in data]} {checksum(data):08x}" if data else fingerprint(trial),
    }


def _described(value: Any) -> str:
    """A text that is equal for equal values, in another process too."""
    if isinstance(value, Mapping):
        return str({name: _described(entry) for name, entry in sorted(value.items(), key=lambda item: str(item[0]))})
    if isinstance(value, functools.partial):
        return f"partial({_described(value.func)}, {_described(value.args)}, {_described(value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"{_described(value.__func__)} of {_described(value.__self__)}"
    if isinstance(value, types.FunctionType):
        bound = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        known = [_described(entry) for entry in (*bound, *(value.__defaults__ or ())) if _is_known(entry)]
        return f"{_name_of(value)} {zlib.crc32(_code(value.__code__).encode()):08x} {known}"
    if isinstance(value, nn.Module):
        settings = {name: entry for name, entry in vars(value).items() if name[0] != "_" and _is_known(entry)}
        parts = [_described(child) for child in value.children()]
        tensors = [*value.parameters(recurse=False), *value.buffers(recurse=False)]
        return f"{_name_of(type(value))} {_described(settings)} {checksum(tensors):08x} {parts}"
    if isinstance(value, frozenset | set):
        return str(sorted(map(_described, value)))
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}{[_described(entry) for entry in value]}"
    return _name_of(value) if callable(value) else repr(value)


def _code(code: types.CodeType) -> str:
    """What a function computes, without the lines on which it stands."""
    constants = [_code(entry) if isinstance(entry, types.CodeType) else _described(entry) for entry in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _is_known(value: Any) -> bool:
    """Whether `_described` says what the value is: others, such as a data set, may have another text in every process."""
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_known, value))
    return isinstance(value, (*PLAIN, types.FunctionType, functools.partial, nn.Module))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a function that refers to itself is not defined yet
        return False


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
