"""Turns the fields of a dataclass into command-line flags, so that each option is written down once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_args, get_type_hints

import typer


def numbers(kind: type[int] | type[float]) -> Callable[[str], list[Any]]:
    """A parser for lists such as `128,128` (int) or `0.9,0.999` (float)."""
    example = "128,128" if kind is int else "0.9,0.999"

    def parse(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.replace(" ", "").split(",")] if text.strip(" ,") else []
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is not a list of numbers separated by commas, such as {example}"
            ) from None

    return parse


def with_flags(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one optional flag per field of the dataclass `options`, with the help text in its metadata.

    The command receives the flags that were passed as the dict `flags`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "flags"]
        types = get_type_hints(options)
        parameters = [*own, *(_parameter(field, types[field.name]) for field in fields(options))]

        def wrapper(**given: Any) -> None:
            flags = {name: given.pop(name) for name in types}
            command(**given, flags={name: value for name, value in flags.items() if value is not None})

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    kinds = get_args(annotation)
    kind: Any = kinds[0] if type(None) in kinds else annotation
    default = field.default if field.default_factory is MISSING else field.default_factory()
    shown = ",".join(map(str, default)) if isinstance(default, list) else str(default)
    settings: dict[str, Any] = {
        "help": field.metadata["help"],
        "show_default": shown if default is not None and not isinstance(default, bool) else False,
    }
    if kind in (list[int], list[float]):
        settings |= {"parser": numbers(get_args(kind)[0]), "metavar": "N,N,…"}
        kind = str
    annotated = Annotated[kind | None, typer.Option(**settings)]
    return inspect.Parameter(field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotated)
