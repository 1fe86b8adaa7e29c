"""The cases, one file per group, but `large` belongs to `train` and `fused_models` to `models`. Importing registers all."""

from onelaunch.bench.cases import cpu, fused_models, large, memory, models, ops, sweep, tabular, train

__all__ = ["cpu", "fused_models", "large", "memory", "models", "ops", "sweep", "tabular", "train"]
