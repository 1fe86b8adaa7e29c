"""A sweep's result that is pickled: with what makes its networks, where pickle takes that."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from onelaunch.errors import OnelaunchError, first_line
from onelaunch.sweep.member import Member


@dataclass(frozen=True)
class MakeTrained:
    """Makes the trained network of a member, from the sweep's functions and data."""

    make: Callable[[Member], nn.Module]

    def __call__(self, member: Member) -> nn.Module:
        return self.make(member)

    def __deepcopy__(self, memo: dict[int, Any]) -> MakeTrained:
        return self

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        try:
            pickle.Pickler(_Nowhere()).dump(self.make)
        except Exception as error:  # of the user's classes: any
            return WithoutNetworks, (first_line(error),)
        return MakeTrained, (self.make,)


@dataclass(frozen=True)
class WithoutNetworks:
    """In place of MakeTrained, where the sweep's functions or data could not be pickled."""

    reason: str

    def __call__(self, member: Member) -> nn.Module:
        raise OnelaunchError(
            f"this result was pickled without its networks ({self.reason}): pickle result.best_model too, or pass make_model "
            "and loss as functions of a module"
        )


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)
