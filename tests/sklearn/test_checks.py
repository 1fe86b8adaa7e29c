"""scikit-learn's own checks of an estimator, all of them, with no expected failure.

They fit hundreds of small tables of different shapes. The eager engine, which compiles nothing, takes seconds for that.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from onelaunch.sklearn import MLPClassifier, MLPRegressor

QUICK = {"hidden_layer_sizes": (32,), "max_iter": 20, "learning_rate_init": 0.02, "engine": "eager", "device": "cpu"}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")  # some checks warn on purpose
@parametrize_with_checks([MLPClassifier(**QUICK), MLPRegressor(**QUICK)])
def test_estimator(estimator: object, check: Callable[[object], None]) -> None:
    check(estimator)
