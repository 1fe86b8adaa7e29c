"""Turns the fields of a dataclass into command-line flags, so that each option is written down once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from types import UnionType
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


def names(text: str) -> tuple[str, ...]:
    """A parser for lists such as `f1,roc_auc`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def class_weights(text: str) -> str | dict[str, float]:
    """A parser for `balanced`, or for classes with their weights, such as `0=1,1=5`."""
    if "=" not in text:
        return text
    try:
        return {label.strip(): float(weight) for label, weight in (part.rsplit("=", 1) for part in text.split(","))}
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither balanced nor a list of weights such as 0=1,1=5") from None


PARSERS: dict[Any, tuple[Callable[[str], Any], str]] = {  # by the type of the field
    list[int]: (numbers(int), "N,N,…"),
    list[float]: (numbers(float), "N,N,…"),
    tuple[str, ...]: (names, "NAME,NAME,…"),
    str | dict[Any, float]: (class_weights, "balanced|CLASS=N,…"),
}


def with_flags(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one optional flag per field of the dataclass `options`, with the help text in its metadata.

    The command receives the flags that were passed as the dict `flags`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "flags"]
        types = get_type_hints(options)
        declared = list(options.__annotations__)  # a class's own fields come before those that it inherits
        ordered = sorted(fields(options), key=lambda field: field.name not in declared)
        parameters = [*own, *(_parameter(field, types[field.name]) for field in ordered)]

        def wrapper(**given: Any) -> None:
            flags = {name: given.pop(name) for name in types}
            command(**given, flags={name: value for name, value in flags.items() if value is not None})

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    several = [kind for kind in PARSERS if isinstance(kind, UnionType) and set(get_args(kind)) == set(kinds)]
    kind: Any = several[0] if several else kinds[0] if isinstance(annotation, UnionType) else annotation
    default = field.default if field.default_factory is MISSING else field.default_factory()
    shown = ",".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
    settings: dict[str, Any] = {
        "help": field.metadata["help"],
        "show_default": shown if default not in (None, ()) and not isinstance(default, bool) else False,
    }
    if kind in PARSERS:
        settings |= dict(zip(("parser", "metavar"), PARSERS[kind], strict=True))
        kind = str
    annotated = Annotated[kind | None, typer.Option(**settings)]
    return inspect.Parameter(field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotated)
