"""What a run computes with, as a text that is the same in another process: its rows, and the user's functions.

A function counts by its name, its code and the plain values it is bound to, a module by its settings and tensors. So a function
that computes something else is another one, though it has the same name.
"""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from onelaunch.engines.contract import Run

PLAIN = (type(None), bool, int, float, complex, str, bytes)
MAX_CHECKSUM_BYTES = 2**28  # of larger data, the fingerprint covers SAMPLED_ROWS rows only
SAMPLED_ROWS = 1024


def fingerprint(run: Run) -> str:
    """Shape and checksum of the run's data: of all rows, or of 1,024 evenly spaced ones if the data is very large."""
    weights = () if run.weights is None else (run.weights,)
    return f"{list(run.x.shape)} {checksum((run.x, run.y, *run.more_x, *weights)):08x}"


def validation_fingerprint(run: Run) -> str:
    """As `fingerprint`, of the validation rows; empty without any."""
    if run.validation is None:
        return ""
    x, y = run.validation
    return f"{list(x.shape)} {checksum((x, y, *run.more_validation_x)):08x}"


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Of the values of all tensors; of 1,024 evenly spaced rows of a tensor that is very large."""
    found = 0
    for tensor in tensors:
        sample = tensor
        if tensor.nbytes > MAX_CHECKSUM_BYTES:
            rows = torch.linspace(0, len(tensor) - 1, min(SAMPLED_ROWS, len(tensor)), dtype=torch.float64).long()
            sample = tensor[rows.to(tensor.device)]
        found = zlib.crc32(sample.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, found)
    return found


def described(value: Any) -> str:
    """A text that is equal for equal values, in another process too."""
    if isinstance(value, Mapping):
        return str({name: described(entry) for name, entry in sorted(value.items(), key=lambda item: str(item[0]))})
    if isinstance(value, functools.partial):
        return f"partial({described(value.func)}, {described(value.args)}, {described(value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"{described(value.__func__)} of {described(value.__self__)}"
    if isinstance(value, types.FunctionType):
        bound = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        known = [described(entry) for entry in (*bound, *(value.__defaults__ or ())) if _is_known(entry)]
        return f"{_name_of(value)} {zlib.crc32(_code(value.__code__).encode()):08x} {known}"
    if isinstance(value, nn.Module):
        settings = {name: entry for name, entry in vars(value).items() if name[0] != "_" and _is_known(entry)}
        parts = [described(child) for child in value.children()]
        tensors = [*value.parameters(recurse=False), *value.buffers(recurse=False)]
        return f"{_name_of(type(value))} {described(settings)} {checksum(tensors):08x} {parts}"
    if isinstance(value, frozenset | set):
        return str(sorted(map(described, value)))
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}{[described(entry) for entry in value]}"
    return _name_of(value) if callable(value) else repr(value)


def _code(code: types.CodeType) -> str:
    """What a function computes, without the lines on which it stands."""
    constants = [_code(entry) if isinstance(entry, types.CodeType) else described(entry) for entry in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _is_known(value: Any) -> bool:
    """Whether `described` says what the value is: others, such as a data set, may have another text in every process."""
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
