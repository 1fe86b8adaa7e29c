"""Recordings are tested like the rest of level 2: graphs run as PyTorch operations, without code generation."""

from tests.fuse.conftest import few_threads, fresh_dynamo, inductor, no_code
from tests.step.tape import tapes

__all__ = ["few_threads", "fresh_dynamo", "inductor", "no_code", "tapes"]
