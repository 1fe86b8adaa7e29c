"""The cases, one file per group. Importing registers them.

`large` and `images` belong to the group `train`, `fused_models` to `models`, `norms` to `ops`.
"""

from onelaunch.bench.cases import cpu, fused_models, images, large, memory, models, norms, ops, sweep, tabular, train

__all__ = ["cpu", "fused_models", "images", "large", "memory", "models", "norms", "ops", "sweep", "tabular", "train"]
