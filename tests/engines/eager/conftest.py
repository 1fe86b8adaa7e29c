"""Captured steps are tested like the rest of level 2, on tapes."""

from tests.fuse.conftest import few_threads, fresh_dynamo
from tests.step.tape import tapes

__all__ = ["few_threads", "fresh_dynamo", "tapes"]
