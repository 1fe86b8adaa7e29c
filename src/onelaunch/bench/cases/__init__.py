"""The cases, one file a group. Importing this package registers them all."""

from onelaunch.bench.cases import cpu, ops, train

__all__ = ["cpu", "ops", "train"]
