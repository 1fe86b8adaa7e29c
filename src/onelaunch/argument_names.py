"""Unknown keyword arguments: the message names the nearest valid one, or how other libraries' arguments are called here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from onelaunch.errors import ArgumentTypeError, suggest

P = ParamSpec("P")
T = TypeVar("T")


def advise_by(advice: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that an unknown keyword argument raises ArgumentTypeError with the nearest valid name.

    advice: by an argument of another library, how to say it here.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in known:
                    hint = f": here it is {advice[name]}" if name in advice else suggest(name, known)
                    raise ArgumentTypeError(
                        f"{function.__name__} has no argument {name!r}{hint or ': it has ' + ', '.join(known)}"
                    )
            return function(*args, **kwargs)

        return call

    return decorate
