"""What a run computes with, as a text that is the same in another process: its rows, and the user's functions.

A function counts by its name, its code and the plain values and tensors it is bound to, an object or a module by its settings
and tensors. So a function that computes something else is another one, though it has the same name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
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


def identity_text(value: Any) -> str:
    """A text that is equal for equal values, in another process too."""
    return _identity_text(value, ())


def _identity_text(value: Any, inside: tuple[int, ...]) -> str:
    """`inside`: the ids of the values that contain this one, so that one that contains itself does not go on for ever."""
    if id(value) in inside:
        return "itself"
    text = functools.partial(_identity_text, inside=(*inside, id(value)))
    if isinstance(value, torch.Tensor | np.ndarray):
        return _array(value)
    if isinstance(value, Mapping):
        return str({name: text(entry) for name, entry in sorted(value.items(), key=lambda item: str(item[0]))})
    if isinstance(value, frozenset | set):
        return str(sorted(map(text, value)))
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}{[text(entry) for entry in value]}"
    if isinstance(value, functools.partial):
        return f"partial({text(value.func)}, {text(value.args)}, {text(value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"{text(value.__func__)} of {text(value.__self__)}"
    if isinstance(value, types.FunctionType):
        known = [text(entry) for entry in _bound_to(value) if _is_known(entry)]
        return f"{_name_of(value)} {zlib.crc32(_code(value.__code__).encode()):08x} {known}"
    if _has_settings(value):
        return _object(value, text)
    return _name_of(value) if callable(value) else repr(value)


def _object(value: Any, text: Callable[[Any], str]) -> str:
    """The class of an object, the code of its call, and its settings and tensors; of a module its parts too."""
    settings = {name: entry for name, entry in vars(value).items() if name[0] != "_" and _is_known(entry)}
    call, parts = _call_of(value), [text(settings)]
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(recurse=False), *value.buffers(recurse=False)]
        call, parts = type(value).forward, [*parts, text(tensors), text(list(value.children()))]
    code = f"{zlib.crc32(_code(call.__code__).encode()):08x}" if isinstance(call, types.FunctionType) else ""
    return f"{_name_of(type(value))} {code} {parts}"


def _array(value: torch.Tensor | np.ndarray) -> str:
    if isinstance(value, np.ndarray):
        found = identity_text(value.tolist()) if value.dtype.hasobject else f"{zlib.crc32(value.tobytes()):08x}"
    else:
        is_plain = value.layout == torch.strided and not value.is_meta and not value.is_quantized
        found = f"{checksum((value,)):08x}" if is_plain else ""
    return f"{value.dtype} {list(value.shape)} {found}"


def _bound_to(function: types.FunctionType) -> Iterator[Any]:
    """What a function's result depends on besides its arguments, as far as that is plain to see."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    yield from function.__defaults__ or ()
    yield function.__kwdefaults__ or {}
    found = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    yield {name: entry for name, entry in found.items() if isinstance(entry, PLAIN) and not name.startswith("__")}


def _code(code: types.CodeType) -> str:
    """What a function computes, without the lines on which it stands."""
    constants = [
        _code(entry) if isinstance(entry, types.CodeType) else identity_text(entry) for entry in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _is_known(value: Any) -> bool:
    """Whether `identity_text` says what the value is: others, such as a data set, may have another text in every process."""
    if isinstance(value, Mapping):
        return all(map(_is_known, value.values()))
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_known, value))
    kinds = (*PLAIN, types.FunctionType, functools.partial, torch.Tensor, np.ndarray, np.generic)
    return isinstance(value, kinds) or _has_settings(value)


def _has_settings(value: Any) -> bool:
    """Whether it is a dataclass, or an object with a `__call__` in Python: a module, or a loss with settings."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    return dataclasses.is_dataclass(value) or isinstance(_call_of(value), types.FunctionType)


def _call_of(value: Any) -> Any:
    return inspect.getattr_static(type(value), "__call__", None)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a function that refers to itself is not defined yet
        return False


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
