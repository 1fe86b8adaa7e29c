"""Level 2's tests run rewritten graphs as PyTorch operations: generating code for each would take seconds per test."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from onelaunch.fuse import backend

CODE_GENERATOR_REASON = backend.no_code_generator_reason  # before a test replaces it


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Functions of one test module are compiled anew in each test: Dynamo stops after 8 compilations of one code object."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def few_threads(one_thread: None) -> None:
    """The tensors are tiny."""


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend finds no code generator, and says so to nobody."""
    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "this is a test")
    monkeypatch.setattr(backend, "_log_once", lambda reason: None)


@pytest.fixture
def inductor() -> None:
    """Inductor, imported without the warnings of its parts; skips where it cannot generate code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._inductor.compile_fx  # noqa: F401
    if CODE_GENERATOR_REASON("cpu"):
        pytest.skip("there is no C++ compiler")
