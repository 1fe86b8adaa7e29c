"""The cases, one file per group (`large` belongs to `train`). Importing this package registers all of them."""

from onelaunch.bench.cases import cpu, large, memory, models, ops, train

__all__ = ["cpu", "large", "memory", "models", "ops", "train"]
