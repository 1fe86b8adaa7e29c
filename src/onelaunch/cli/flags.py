"""Turns the fields of a pydantic model into command line flags, so that each is written down once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer
from pydantic import BaseModel


def numbers(kind: type[int] | type[float]) -> Callable[[str], list[Any]]:
    """A parser of `128,128`, or of `0.9,0.999`."""
    example = "128,128" if kind is int else "0.9,0.999"

    def parse(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.replace(" ", "").split(",")] if text.strip(" ,") else []
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is not a list of numbers with commas between, such as {example}"
            ) from None

    return parse


def with_flags(model: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one optional flag a field of `model`; those that were passed arrive as the dict `flags`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
        added = [_parameter(name, model) for name in model.model_fields]

        def wrapper(**given: Any) -> None:
            flags = {name: given.pop(name) for name in model.model_fields}
            command(**given, flags={name: value for name, value in flags.items() if value is not None})

        parameters = [*own, *added]
        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _parameter(name: str, model: type[BaseModel]) -> inspect.Parameter:
    field = model.model_fields[name]
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    kind: Any = kinds[0] if kinds and type(None) in get_args(field.annotation) else field.annotation
    default = field.default
    shown: Any = ",".join(map(str, default)) if isinstance(default, list) else default
    show_default: Any = str(shown) if default is not None and not isinstance(default, bool) else False
    if kind in (list[int], list[float]):
        element = get_args(kind)[0]
        option = typer.Option(
            parser=numbers(element), metavar="N,N,…", help=field.description, show_default=show_default
        )
        kind = str
    else:
        option = typer.Option(help=field.description, show_default=show_default)
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)
