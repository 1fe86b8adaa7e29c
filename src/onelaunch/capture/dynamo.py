"""How Dynamo is called: each function by itself, without breaks at log messages, and with its reasons in plain words."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from onelaunch.capture.substitutes import substitute
from onelaunch.errors import first_line
from onelaunch.loggers import logging_from

# What Dynamo says where it ends a graph, as a regular expression, and the same in plain words.
BREAKS = (
    (r"Tensor\.item\(\)|Tensor\.tolist|Tensor\.numpy", "a tensor's value is read on the host"),
    (r"generic_jump|[Dd]ata-dependent", "the program branches on a tensor's value"),
    (r"[Dd]ynamic shape operator|nonzero|[Dd]ata dependent operator", "the size of a result depends on values"),
    (r"builtin operator `(\w+)`", r"the program calls `\1`"),
    (r"torch\.compiler\.disable|_dynamo\.disable", "a function is excluded by torch.compiler.disable"),
    (r"graph_break\(", "the program asks for a break"),
    (r"\bRandom\.\w+|\bRandomState\b|\bGenerator\b", "random numbers are drawn on the host"),
    (r"\b(RNN|LSTM|GRU)\b", "recurrent layers are not captured"),
    (r"autograd\.grad", "the program computes gradients itself"),
    (r"requires_grad", "the program sets requires_grad of a tensor"),
    (r"returned non-Tensor", "a function of PyTorch returns something else than tensors"),
    (r"step_unsupported", "Dynamo cannot follow the program here"),
)
WARNING_ONCE = "warning_once"  # a method that `transformers` adds to `logging.Logger`
_numbers = itertools.count()


def compile_by(backend: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` of a function by itself: what it captures depends on no other function that was compiled before."""
    substitute()
    return torch.compile(own_code(function), backend=backend, **options)


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object and a name of its own.

    Dynamo counts recompilations per code object and stops after 8, so functions of different models must not share one. Sizes
    that it has seen change are kept by name: another model's batch size must not make this model's shapes dynamic. Modules that
    the code reads are kept in the function's global variables, where two of one name would be in each other's way.
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(own_code(function.__func__), function.__self__)
    if not isinstance(function, types.FunctionType):
        return function
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_numbers)}")
    variables = function.__globals__
    if str(variables.get("__name__")).startswith("onelaunch."):  # whose own variables never change
        variables = dict(variables)
    made = types.FunctionType(code, variables, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@contextlib.contextmanager
def without_log_breaks() -> Iterator[None]:
    """Inside, Dynamo leaves out the warnings that `transformers` logs, as in its losses, instead of ending a graph at each.

    It ends a graph at other warnings, which are logged. An error that is also raised, such as one of shapes, is not logged.
    """
    # PyTorch 2.11 sorts the set, so it may hold one function; it also logs that it cannot write the set as JSON.
    if hasattr(torch._dynamo.config, "ignore_logging_functions"):
        messages = _warnings_of_transformers(len(logging.Logger.manager.loggerDict))
    else:
        messages = {vars(logging.Logger)[WARNING_ONCE]} if WARNING_ONCE in vars(logging.Logger) else set()
    loggers = [logging.getLogger(name) for name in ("torch._dynamo.metrics_context", "torch._subclasses.fake_tensor")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        # A module's number that changes is no constant: a layer that counts its calls would be compiled anew in each.
        with torch._dynamo.config.patch(ignore_logger_methods=messages, allow_unspec_int_on_nn_module=True):
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@functools.lru_cache(maxsize=1)
def _warnings_of_transformers(number: int) -> set[Callable[..., Any]]:
    """The methods of its loggers that warn; looked up anew when the `number` of all loggers has changed."""
    found = [logging.getLogger(name) for name in logging.Logger.manager.loggerDict if name.startswith("transformers")]
    return {getattr(log, name) for log in found for name in ("warning", WARNING_ONCE) if hasattr(log, name)}


@contextlib.contextmanager
def without_dynamo_warnings() -> Iterator[None]:
    """Dynamo warns of graph breaks in a dozen lines; the caller tells of them in one."""
    with logging_from(logging.ERROR, "torch._dynamo"), warnings.catch_warnings():
        # It looks at the gradients of the values that one graph hands to the next.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", "Dynamo does not know how to trace")
        yield


def break_reason(reason: Any) -> str:
    """`a tensor's value is read on the host (model.py:14)`"""
    frame = reason.user_stack[-1] if reason.user_stack else None
    place = f" ({Path(frame.filename).name}:{frame.lineno})" if frame is not None else ""
    return plain_break(str(reason.reason)) + place


def plain_break(message: str) -> str:
    """One plain line for Dynamo's message about a graph break: an entry of BREAKS, or else the message's first line."""
    for expression, words in BREAKS:
        if found := re.search(expression, message):
            return found.expand(words)
    return first_line(message) or "no reason is given"
