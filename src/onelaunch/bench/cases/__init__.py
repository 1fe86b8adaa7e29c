"""The cases, one file a group. Importing this package registers them all."""

from onelaunch.bench.cases import train

__all__ = ["train"]
