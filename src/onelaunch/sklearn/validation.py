"""scikit-learn's check of the rows of an estimator, with our remedy for text and missing values."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

TEXT, MISSING = "could not convert string to float", ("Input X contains NaN", "NAType")
REMEDY = (
    "TableEncoder of onelaunch.sklearn takes a DataFrame with text and missing values: "
    "make_pipeline(TableEncoder(), {}(scale=None))"
)


def validated(estimator: Any, X: Any, *y: Any, **options: Any) -> Any:
    """What `validate_data` of scikit-learn returns: X as floats, maybe sparse, and y if it is given.

    An error about text or missing values in X ends with one line that names `TableEncoder`.
    """
    try:
        return validate_data(estimator, X, *y, accept_sparse="csr", dtype=(np.float64, np.float32), **options)
    except (ValueError, TypeError) as error:
        message = str(error)
        if any(words in message for words in MISSING) or (TEXT in message and _has_text(X)):
            error.args = (f"{message}\n{REMEDY.format(type(estimator).__name__)}",)
        raise


def _has_text(X: Any) -> bool:
    """Whether the values of X are not all numbers: an error about text may be about y."""
    try:
        np.asarray(X, np.float64)
    except (ValueError, TypeError):
        return True
    return False
