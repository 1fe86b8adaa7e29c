"""The names of the validation metrics, for argument checks and help texts; `train/metrics.py` computes them."""

from __future__ import annotations

from onelaunch.errors import require_option

CLASS_METRICS = (
    "balanced_accuracy", "f1", "f1_macro", "f1_micro", "f1_weighted", "precision", "recall", "roc_auc",
    "average_precision", "log_loss", "matthews_corrcoef",
)  # fmt: skip
VALUE_METRICS = ("r2", "rmse", "mae", "mse", "median_absolute_error", "explained_variance")
METRICS = (*CLASS_METRICS, *VALUE_METRICS)
VALIDATION_METRICS = ("loss", "accuracy", *METRICS)  # what EarlyStopping can follow
LOSSES = frozenset({"loss", "log_loss", "rmse", "mae", "mse", "median_absolute_error"})
ELSEWHERE = {"auc": "roc_auc", "mean_squared_error": "mse", "mean_absolute_error": "mae", "mcc": "matthews_corrcoef",
             "root_mean_squared_error": "rmse", "f1_score": "f1", "r2_score": "r2", "val_loss": "loss",
             "val_accuracy": "accuracy", "acc": "accuracy", "nll": "log_loss"}  # fmt: skip


def is_loss(metric: str) -> bool:
    """Whether smaller values of the metric are better."""
    return metric in LOSSES


def require_metric(argument: str, name: object, options: tuple[str, ...] = METRICS) -> None:
    """Raise OnelaunchError unless `name` is one of `options`; names of other libraries get ours as advice."""
    ours = ELSEWHERE.get(name) if isinstance(name, str) else None
    hint = f"{ours!r}, which is what {name!r} is called here" if ours in options else ""
    require_option(argument, name, options, or_else=hint)
