"""The cases, one file per group; `large`, `images` belong to `train`, `fused_models` to `models`. Importing registers them."""

from onelaunch.bench.cases import cpu, fused_models, images, large, memory, models, ops, sweep, tabular, train

__all__ = ["cpu", "fused_models", "images", "large", "memory", "models", "ops", "sweep", "tabular", "train"]
