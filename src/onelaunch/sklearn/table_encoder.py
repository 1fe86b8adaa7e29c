"""A transformer for tables with text and missing values: the preprocessing of `onelaunch train`, in a scikit-learn pipeline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted

from onelaunch.data import encoder
from onelaunch.data.table_encoding import as_table
from onelaunch.errors import ArgumentTypeError

log = logging.getLogger("onelaunch")


class TableEncoder(TransformerMixin, BaseEstimator):
    """Turns the columns of a table into the inputs of a network: numbers scaled, text as one input per category.

    `make_pipeline(TableEncoder(), MLPClassifier(scale=None)).fit(frame, y)` trains on a DataFrame. Columns are found by name
    when rows are transformed; a category that `fit` has not seen becomes zeros. docs/tables.md has the rules.

    categorical: the names of columns of numbers that are names of categories.

    `left_out_` has the columns that are not used, with the reasons. The logger "onelaunch" warns of them in `fit`.
    """

    def __init__(self, categorical: Sequence[str | int] = ()) -> None:
        self.categorical = categorical

    def fit(self, X: Any, y: Any = None) -> TableEncoder:
        """Learn scaling and categories. X: a pandas or polars DataFrame, a dict of columns, or the path of a file."""
        if isinstance(self.categorical, str):
            raise ArgumentTypeError(
                f"categorical={self.categorical!r} is a str: pass a list, such as [{self.categorical!r}]"
            )
        categorical = [str(name) for name in self.categorical]  # a DataFrame may have numbers as names
        table = as_table(X, categorical)
        encoder.check_categorical(table.path, table.names, categorical)
        self.encoder_ = encoder.TableEncoder.fit(table, table.names, categorical)
        for note in self.encoder_.notes:
            log.warning("%s", note)
        self.n_features_in_, self.feature_names_in_ = len(table.names), np.array(table.names, dtype=object)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """The inputs of the rows of X, float32 `[rows, inputs]`."""
        check_is_fitted(self)
        return self.encoder_.transform(as_table(X, list(self.encoder_.categories)))

    @property
    def left_out_(self) -> dict[str, str]:
        """By column that is not used: the reason, such as "is constant"."""
        check_is_fitted(self)
        return dict(self.encoder_.left_out)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """The name of each input: `age`, `age ramp 1`, `age missing`, `colour=red`. Text that is missing is `colour missing`.

        input_features: None, or the names of the columns of `fit`.
        """
        check_is_fitted(self)
        _check_feature_names_in(self, input_features)
        return np.array(self.encoder_.input_names, dtype=object)
