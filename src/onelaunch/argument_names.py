"""Unknown and missing arguments: the message names the nearest valid one, or how other libraries' arguments are called here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from onelaunch.errors import ArgumentTypeError, suggest

P = ParamSpec("P")
T = TypeVar("T")


def advise_by(advice: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that an unknown keyword argument raises ArgumentTypeError with the nearest valid name, and a
    missing argument with the call as it should be.

    advice: by an argument of another library, how to say it here.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters.values()
        known = [one.name for one in parameters]
        required = [
            one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty
        ]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in known:
                    hint = f": here it is {advice[name]}" if name in advice else suggest(name, known)
                    raise ArgumentTypeError(
                        f"{function.__name__} has no argument {name!r}{hint or ': it has ' + ', '.join(known)}"
                    )
            missing = [name for name in required[len(args) :] if name not in kwargs]
            if missing:
                right = f"{function.__name__}({', '.join(required)})"
                raise ArgumentTypeError(f"{function.__name__} was called without {' and '.join(missing)}: call {right}")
            return function(*args, **kwargs)

        return call

    return decorate
