"""The figures that `train` and `evaluate` print are scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics

from onelaunch.train.scores import class_scores


@pytest.mark.parametrize(("classes", "present"), [(2, 2), (3, 3), (5, 3)])
def test_class_scores_are_those_of_scikit_learn(classes, present):
    """Also where no row of a class is held out: it does not count."""
    draw = np.random.default_rng(classes)
    y, predicted = draw.integers(0, present, (2, 60))
    found, constant = class_scores(y, predicted, classes, majority=1)
    average = "binary" if classes == 2 else "macro"
    for scores, chosen in ((found, predicted), (constant, np.ones_like(y))):
        assert scores["accuracy"] == pytest.approx(metrics.accuracy_score(y, chosen))
        assert scores["balanced accuracy"] == pytest.approx(metrics.balanced_accuracy_score(y, chosen))
        assert scores["F1"] == pytest.approx(metrics.f1_score(y, chosen, average=average))
