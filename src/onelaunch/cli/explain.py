"""`onelaunch explain`: what fusing does to a model from a file, measured on this machine or predicted for a device."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from torch import nn

from onelaunch.device import default_device
from onelaunch.errors import OnelaunchError, require_option, suggest
from onelaunch.fuse import explain
from onelaunch.roofline import DEVICES


def run_explain(
    model: str, input: list[str], device: str | None, dtype: str, eval: bool, html: Path | None, as_json: bool
) -> None:
    if device is not None:
        require_option("device", device, DEVICES)
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise OnelaunchError(f"html={str(html)!r} must end in .html")
    element_type = getattr(torch, dtype)
    where = torch.device("cpu") if device is not None else default_device()
    named: dict[str, Any] = {
        name: _input(text, element_type, where) for name, given, text in map(_split_name, input) if given
    }
    shapes = [_input(text, element_type, where) for _, given, text in map(_split_name, input) if not given]
    with contextlib.redirect_stdout(
        sys.stderr
    ):  # standard output is for the explanation, not for what the model prints
        try:
            network = _load(model).to(where, element_type).train(not eval)
        except OnelaunchError:
            raise
        except (Exception, SystemExit) as error:  # the user's code may raise anything, and may call exit()
            raise _refused(model, "made", error) from error
        try:
            explanation = explain(network, *shapes, device=device, **named)
        except SystemExit as error:
            raise _refused(model, "run", error) from error
    if as_json:
        typer.echo(json.dumps(explanation.to_dict(), indent=1))
    else:
        Console().print(explanation)
    if html is not None:
        typer.echo(f"page     {explanation.html(html)}", err=as_json)


def _split_name(text: str) -> tuple[str, str, str]:
    """The name of an input and "=" (both empty if it has no name), and its shape."""
    name, given, shape = text.partition("=")
    if given and name in ("device", "time"):
        raise OnelaunchError(f"input={text!r} has the name of an option: pass it by its position, as {shape}")
    return (name, given, shape) if given else ("", "", text)


def _input(text: str, dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    shape, typed, kind = text.partition(":")
    written = re.fullmatch(
        r"[0-9]{1,999}(x[0-9]{1,999})*", shape
    )  # int() also takes 1_000, +3 and other scripts' digits
    sizes = [int(part) for part in shape.split("x")] if written else [0]
    if min(sizes) < 1:
        raise OnelaunchError(f"input={text!r} is not a shape: pass sizes with x between, such as 64x784 or 8x128:int64")
    if typed and kind != "int64":
        raise OnelaunchError(f"input={text!r} has the type {kind!r}: pass int64 for indices, or none for numbers")
    try:
        if kind:
            return torch.zeros(sizes, dtype=torch.int64, device=where)
        return torch.randn(sizes, device=where).to(dtype)
    except (RuntimeError, TypeError, OverflowError) as error:  # more than memory holds, or more than a size may be
        raise OnelaunchError(f"input={text!r} does not fit into memory: pass smaller sizes") from error


def _refused(target: str, what: str, error: BaseException) -> OnelaunchError:
    text = str(error).strip().splitlines()
    return OnelaunchError(
        f"model={target!r} cannot be {what}: {type(error).__name__}: {text[0] if text else ''}; mend it, then try again"
    )


def _load(target: str) -> nn.Module:
    """The model that `FILE.py:NAME` names."""
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not file and Path(target).is_file():
        raise OnelaunchError(f"model={target!r} names no model in the file: pass {target}:NAME, such as {target}:build")
    if not file or not path.is_file():
        raise OnelaunchError(f"model={target!r} names no file: pass FILE.py:NAME, such as model.py:build")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OnelaunchError(f"model={target!r} is not a Python file: pass FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    beside = str(path.resolve().parent)
    sys.path.insert(0, beside)  # so that it can import its neighbours
    try:
        spec.loader.exec_module(module)
        found: Any = getattr(module, name, None)
        if found is None:
            raise OnelaunchError(
                f"model={target!r}: {path} has no {name!r}: pass FILE.py:NAME{suggest(name, vars(module))}"
            )
        made = found if isinstance(found, nn.Module) else found()
    finally:
        sys.path.remove(beside)
    if not isinstance(made, nn.Module):
        raise OnelaunchError(
            f"model={target!r} gives a {type(made).__name__}: pass a name that gives a torch.nn.Module"
        )
    return made
