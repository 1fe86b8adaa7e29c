"""How good predictions are, beside those of the best constant: the figures that `train` and `evaluate` print.

scikit-learn computes them; it is imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Scores = dict[str, float]


def class_scores(y: np.ndarray, predicted: np.ndarray, classes: int, majority: int) -> tuple[Scores, Scores]:
    """Accuracy, balanced accuracy and F1 of predicted class numbers, and the same of always predicting `majority`.

    F1 is that of the second class of two, and of more the unweighted mean over those in `y` or among the predictions, as
    scikit-learn defines it.
    """
    from sklearn import metrics

    average = "binary" if classes == 2 else "macro"
    present = np.unique(y)

    def scores(chosen: np.ndarray) -> Scores:
        recalls = [float((chosen[y == label] == label).mean()) for label in present]
        return {
            "accuracy": float((chosen == y).mean()),
            "balanced accuracy": float(np.mean(recalls)),
            "F1": float(metrics.f1_score(y, chosen, average=average, zero_division=0.0)),
        }

    return scores(predicted), scores(np.full_like(predicted, majority))


def value_scores(y: np.ndarray, predicted: np.ndarray, mean: float) -> tuple[Scores, Scores]:
    """R², RMSE and MAE of predicted values, and the same of always predicting `mean`."""
    from sklearn import metrics

    def scores(values: np.ndarray) -> Scores:
        constant = len(y) < 2 or bool((y == y[0]).all())
        return {
            "R²": float("nan") if constant else float(metrics.r2_score(y, values)),
            "RMSE": float(np.sqrt(metrics.mean_squared_error(y, values))),
            "MAE": float(metrics.mean_absolute_error(y, values)),
        }

    return scores(predicted), scores(np.full(len(y), mean))


def describe(scores: Scores, constant: Scores, classes: Sequence[str] | None = None) -> str:
    """`accuracy 0.9123 (constant 0.5012), …`. Of two classes, F1 says which one it is of: `F1 of 'yes'`."""
    two = classes is not None and len(classes) == 2
    names = {"F1": f"F1 of {classes[1]!r}"} if two and classes else {}
    return ", ".join(
        f"{names.get(name, name)} {value:.4g} (constant {constant[name]:.4g})" for name, value in scores.items()
    )
