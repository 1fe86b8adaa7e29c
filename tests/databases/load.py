"""PyTorch's own databases of modules and optimizers, imported without what that import changes for other tests.

`torch.testing._internal` is private: what it cannot import or no longer has skips the tests of this folder, with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

DATABASES = "torch.testing._internal.common_"
UNFROZEN = (
    "__allow_nonbracketed_mutation_flag"  # a variable of torch.backends: the import forbids to set flags such as TF32
)


def load(module: str, name: str) -> list[Any]:
    """The list `name` of `torch.testing._internal.common_<module>`; skips the calling test module where there is none."""
    try:
        with import_undone(), expecttest_there():
            return list(getattr(importlib.import_module(DATABASES + module), name))
    except (ImportError, AttributeError) as error:
        pytest.skip(f"PyTorch's database {name} cannot be imported: {error}", allow_module_level=True)


@contextlib.contextmanager
def import_undone() -> Iterator[None]:
    """Around the import: no warnings, and afterwards the environment, paths, random numbers, flags and calls of before."""
    calls = [(one, one.__call__) for one in (torch._C.ScriptFunction, torch._C.ScriptMethod)]
    path, environment, random = list(sys.path), dict(os.environ), torch.get_rng_state()
    backends = torch.backends.flags_frozen.__globals__  # `torch.backends` itself is no plain module
    unfrozen = backends[UNFROZEN]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        backends[UNFROZEN] = unfrozen
        for owner, call in calls:
            owner.__call__ = call  # type: ignore[method-assign]
        sys.path[:] = path
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        torch.set_rng_state(random)


@contextlib.contextmanager
def expecttest_there() -> Iterator[None]:
    """Without the package expecttest: inside, a module in its place. PyTorch derives its TestCase from the one in it, and the
    databases use neither.
    """
    if importlib.util.find_spec("expecttest") is not None:
        yield
        return
    stand_in: Any = types.ModuleType("expecttest")
    stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False
    before = {name: sys.modules[name] for name in ("expecttest",) if name in sys.modules}
    sys.modules["expecttest"] = stand_in
    try:
        yield
    finally:
        del sys.modules["expecttest"]
        sys.modules.update(before)
