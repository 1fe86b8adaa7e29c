"""A call like one that passed the checks is not checked again; a call that only looks like it is."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from onelaunch import batch_norm, cross_entropy, layer_norm, linear
from onelaunch.errors import OnelaunchError
from onelaunch.ops.arguments import KnownCalls


def test_different_calls_are_distinguished():
    known, x, w = KnownCalls(), torch.zeros(4, 3), torch.zeros(5, 3)
    known.add(known.ask((x, w, None), "relu", 1.0))
    assert known.ask((torch.ones(4, 3), w, None), "relu", 1.0) is True
    others = [
        ((x, w, torch.zeros(5)), "relu", 1.0),
        ((x.double(), w, None), "relu", 1.0),
        ((x.to("meta"), w.t(), None), "relu", 1.0),
        ((x, w.t(), None), "relu", 1.0),
        ((x, w, None), "gelu", 1.0),
        ((x, w, None), "relu", True),  # equal to 1.0, but not a probability
        ((x, w, None), "relu", 1),
    ]
    for tensors, *options in others:
        assert known.ask(tensors, *options) is not True


def test_a_call_without_a_key_is_never_known():
    known = KnownCalls()
    for tensors, option in ((([1.0, 2.0],), 0.5), ((torch.zeros(2),), [0.5])):
        assert known.ask(tensors, option) is None


def test_the_number_of_known_calls_is_limited(monkeypatch):
    monkeypatch.setattr(KnownCalls, "MAX_CALLS", 3)
    known = KnownCalls()
    for number in range(10):
        known.add(known.ask((), number))
        assert known.ask((), number) is True
        assert len(known._found) <= 3


def test_compiled_calls_do_not_depend_on_what_is_known():
    """Otherwise each new eager call would compile them again."""
    counter = CompileCounter()
    modules = [
        importlib.import_module(f"onelaunch.ops.{name}") for name in ("linear", "batch_norm", "norm", "cross_entropy")
    ]

    @torch.compile(fullgraph=True, backend=counter)
    def all_of_them(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = batch_norm(linear(x, w, activation="relu"), None, None, training=True, activation="relu")
        return cross_entropy(layer_norm(y), target)

    arguments = torch.randn(8, 4), torch.randn(6, 4), torch.zeros(8, dtype=torch.int64)
    for number in range(4):
        all_of_them(*arguments)
        for module in modules:
            module._known.add(("an eager call", number))
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_an_invalid_call_after_a_valid_one_is_refused():
    x, w, b = torch.randn(8, 4, device="cuda"), torch.randn(6, 4, device="cuda"), torch.randn(6, device="cuda")
    linear(x, w, b, activation="relu", dropout=1.0)
    for change in ({"dropout": True}, {"dropout": 1.5}, {"activation": "rulu"}):
        with pytest.raises(OnelaunchError):
            linear(x, w, b, **{"activation": "relu", "dropout": 1.0, **change})
    for arguments in ((x, w.t(), b), (x, w, b.double()), (x, w.cpu(), b), (x, w, b[:5])):
        with pytest.raises(OnelaunchError):
            linear(*arguments, activation="relu", dropout=1.0)
    with torch.autocast("cuda", torch.bfloat16):
        linear(x, w.bfloat16(), b, activation="relu", dropout=1.0)  # cast to one dtype
    with pytest.raises(OnelaunchError, match="weight has dtype"):
        linear(x, w.bfloat16(), b, activation="relu", dropout=1.0)  # but not outside autocast
    target = torch.zeros(8, dtype=torch.int64, device="cuda")
    cross_entropy(x, target)
    for arguments in ((x, target[:4]), (x, target.cpu()), (x, target.bool())):
        with pytest.raises(OnelaunchError):
            cross_entropy(*arguments)
    mean, var = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    layer_norm(x, mean, residual=x)
    for options in ({"residual": x[:4]}, {"residual": x, "dropout": 2}, {"residual": x.cpu()}):
        with pytest.raises(OnelaunchError):
            layer_norm(x, mean, **options)
    batch_norm(x, mean, var, training=True)
    for arguments in ((x, mean, var[:3]), (x, mean, None), (x[:1], mean, var)):
        with pytest.raises(OnelaunchError):
            batch_norm(*arguments, training=True)
