"""What a scorer of a search returns: one number, or a dict of numbers by metric."""

from __future__ import annotations

import contextlib
import numbers
import warnings
from typing import Any

from onelaunch.errors import ArgumentTypeError, abbreviate


def checked_scores(scores: Any, error_score: Any, *, several: bool) -> Any:
    """`scores` as plain numbers. Raises ArgumentTypeError, a ValueError as in GridSearchCV, for anything else.

    several: whether scikit-learn called one scorer per metric. The text of a traceback then stands for a metric whose scorer
    raised: its score is `error_score`, and a warning says so.
    """
    if not isinstance(scores, dict):
        return _number("scoring", scores)
    found = {}
    for name, score in scores.items():
        if several and isinstance(score, str):
            reason = score.strip().splitlines()[-1]
            warnings.warn(f"scoring[{name!r}] raised {reason}: its score is {error_score}", UserWarning, stacklevel=2)
            score = error_score
        found[name] = _number(f"scoring[{name!r}]", score)
    return found


def _number(name: str, score: Any) -> Any:
    if hasattr(score, "item"):
        with contextlib.suppress(ValueError):  # an array of several numbers
            score = score.item()
    if not isinstance(score, numbers.Number):
        raise ArgumentTypeError(f"{name} must return a number, got {abbreviate(score)}: return for example a float")
    return score
