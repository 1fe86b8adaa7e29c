"""The cases, one file a group. Importing this package registers them all."""

from onelaunch.bench.cases import cpu, fuse, large, memory, ops, train

__all__ = ["cpu", "fuse", "large", "memory", "ops", "train"]
