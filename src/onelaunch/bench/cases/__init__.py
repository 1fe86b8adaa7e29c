"""The cases, one file per group (`large` belongs to `train`). Importing this package registers all of them."""

from onelaunch.bench.cases import cpu, fuse, large, memory, ops, train

__all__ = ["cpu", "fuse", "large", "memory", "ops", "train"]
