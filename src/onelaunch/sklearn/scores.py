"""What a scorer of a search returns: one number, or a dict of numbers by metric."""

from __future__ import annotations

import contextlib
import numbers
import warnings
from typing import Any

from sklearn.metrics._scorer import _MultimetricScorer

from onelaunch.errors import ArgumentTypeError, abbreviate, type_and_message


def scores_of(scorer: Any, estimator: Any, x: Any, y: Any, error_score: Any, arguments: dict[str, Any]) -> Any:
    """The scores of a fit, as in GridSearchCV: one number, or a dict of them by metric. None if the one scorer raised.

    A scorer that raises is a warning, and the fit has not failed; with `error_score="raise"` it raises here.
    """
    several = isinstance(scorer, _MultimetricScorer)
    try:
        scores = scorer(estimator, x, y, **arguments)
    except Exception as error:  # with several metrics, one that they have in common, such as a missing method
        if several or error_score == "raise":
            raise
        message = f"scoring raised {type_and_message(error)}: the score is error_score={error_score}"
        warnings.warn(message, UserWarning, stacklevel=2)
        return None
    return _checked(scores, error_score, several=several)


def _checked(scores: Any, error_score: Any, *, several: bool) -> Any:
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
