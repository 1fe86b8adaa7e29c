"""The cases, one file a group. Importing this package registers them all."""

from onelaunch.bench.cases import cpu, fuse, ops, train

__all__ = ["cpu", "fuse", "ops", "train"]
