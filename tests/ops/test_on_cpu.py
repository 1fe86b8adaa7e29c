"""CPU tensors: PyTorch's own functions in ordinary calls without dropout, the custom ops elsewhere, with equal results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onelaunch as ol
from onelaunch.activations import ACTIVATIONS, activate
from onelaunch.errors import OnelaunchError

OPS = torch.ops.onelaunch


def never(*_: Any) -> Any:
    raise AssertionError("an op was called")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_ordinary_calls_equal_pytorch_to_the_bit(
    activation: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except `cross_entropy` of 16-bit logits, which is computed in fp32 and rounded."""
    for name in ("linear", "batch_norm", "cross_entropy", "norm"):
        monkeypatch.setattr(importlib.import_module(f"onelaunch.ops.{name}"), f"{name}_op", never)
    x, image = torch.randn(6, 4, dtype=dtype), torch.randn(3, 4, 5, 2, dtype=dtype)
    w, b, (scale, shift) = torch.randn(4, 4, dtype=dtype), torch.randn(4, dtype=dtype), torch.rand(2, 4, dtype=dtype)
    target = torch.randint(4, (3, 5, 2))
    target[0, 0] = -100
    ours, theirs = torch.zeros(2, 4, dtype=dtype), torch.zeros(2, 4, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    moved = torch.zeros(2, 2, 4, dtype=wide)
    pairs: list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = [
        (
            lambda *t: ol.linear(*t, activation=activation),
            lambda *t: activate(F.linear(*t), activation),
            [x, w, b],
        ),
        (
            lambda x, w, b: ol.batch_norm(x, ours[0], ours[1], w, b, training=True, activation=activation),
            lambda x, w, b: activate(F.batch_norm(x, theirs[0], theirs[1], w, b, True), activation),
            [image, scale, shift],
        ),
        (
            lambda *t: ol.batch_norm(t[0], *moved[0], *t[1:], training=True, activation=activation),
            lambda *t: activate(F.batch_norm(t[0], *moved[1], *t[1:], True), activation),
            [image, scale.to(wide), shift.to(wide)],
        ),
        (lambda *t: ol.layer_norm(*t, residual=t[0]), lambda *t: F.layer_norm(2 * t[0], (4,), *t[1:]), [x, b, scale]),
        (lambda *t: ol.rms_norm(*t, eps=None), lambda *t: F.rms_norm(t[0], (4,), t[1]), [x, b]),
        (
            lambda t: ol.cross_entropy(t, target, label_smoothing=0.1),
            lambda t: F.cross_entropy(t.to(wide), target, label_smoothing=0.1).to(dtype),
            [image],
        ),
    ]
    for function, reference, tensors in pairs:
        results = []
        for one in (function, reference):
            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            y = one(*leaves)
            results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
        assert all(mine.equal(yours) for mine, yours in zip(*results, strict=True))
    assert ours.equal(theirs)
    assert moved[0].equal(moved[1])


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_the_custom_ops_equal_pytorch(activation: str | None) -> None:
    """Compiled and exported programs, dispatch modes and calls with dropout run them."""
    x, image = torch.randn(6, 4, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    w, b = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    scale, shift = torch.rand(2, 4, dtype=torch.float64)
    target = torch.randint(4, (6,))
    for function, reference, tensors in (
        (
            lambda *t: OPS.linear(*t, activation, 0.0, True)[0],
            lambda *t: activate(F.linear(*t), activation),
            [x, w, b],
        ),
        (
            lambda x, *t: OPS.batch_norm(x, None, None, *t, True, 1e-5, activation, 0.0)[0],
            lambda x, *t: activate(F.batch_norm(x, None, None, *t, True), activation),
            [image, scale, shift],
        ),
        (
            lambda t: OPS.cross_entropy(t, target, 0.1, 2, "mean", False)[0],
            lambda t: F.cross_entropy(t, target, label_smoothing=0.1, ignore_index=2),
            [x],
        ),
    ):
        leaves = tuple(tensor.clone().requires_grad_() for tensor in tensors)
        torch.testing.assert_close(function(*leaves), reference(*leaves))
        assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 4, 2), (3, 4, 2, 5)])
def test_a_class_that_does_not_exist_is_named(shape: tuple[int, ...]) -> None:
    target = torch.full(shape[:1] + shape[2:] if len(shape) > 1 else (), 7)
    with pytest.raises(OnelaunchError, match="target holds 7, out of range for logits of 4 classes: pass 0 to 3"):
        ol.cross_entropy(torch.randn(shape), target)


@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [
        (ol.nn.BatchNorm1d, nn.BatchNorm1d, (5, 4)),
        (ol.nn.BatchNorm1d, nn.BatchNorm1d, (5, 4, 3)),
        (ol.nn.BatchNorm2d, nn.BatchNorm2d, (5, 4, 3, 2)),
        (ol.nn.BatchNorm3d, nn.BatchNorm3d, (5, 4, 3, 2, 2)),
    ],
)
def test_batch_norms_of_all_ranks(ours: Any, theirs: Any, shape: tuple[int, ...]) -> None:
    fused, plain = ours(4, momentum=None, activation="silu"), theirs(4, momentum=None)
    assert isinstance(fused, theirs)
    for _ in range(3):
        x = torch.randn(shape)
        torch.testing.assert_close(fused(input=x), F.silu(plain(input=x)))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], value)
    fused.load_state_dict(plain.state_dict())
    torch.testing.assert_close(fused.eval()(x), F.silu(plain.eval()(x)))
    with pytest.raises(ValueError, match="expected"):
        fused(torch.randn(2, 4, 1, 1, 1, 1))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_checkpointing_updates_statistics_as_with_pytorch(momentum: float | None, dropout: float) -> None:
    """Twice per step; the recomputed forward pass may stop as soon as it has what the backward pass needs."""
    ours, theirs = ol.nn.BatchNorm1d(3, momentum=momentum, dropout=dropout), nn.BatchNorm1d(3, momentum=momentum)
    for shift in (0, 10, 20):
        x = (torch.randn(100, 3) + shift).requires_grad_()
        for module in (ours, theirs):
            checkpoint(module, x, use_reentrant=False).sum().backward()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


def test_modules_are_instances_of_what_they_replace() -> None:
    x, target = torch.randn(5, 4), torch.randint(4, (5,))
    loss = ol.nn.CrossEntropyLoss(ignore_index=0)
    assert isinstance(loss, nn.CrossEntropyLoss)
    assert loss.weight is None
    assert "ignore_index=0" in repr(loss)
    assert loss(input=x, target=target).equal(F.cross_entropy(x, target, ignore_index=0))
    assert ol.nn.Linear(4, 3)(input=x).shape == (5, 3)
    assert ol.nn.ReLUDropout(0.5).eval()(input=x).equal(x.relu())


def test_logits_far_from_zero_keep_the_digits_of_their_gradient() -> None:
    x, target = torch.randn(8, 4) * 3 + 1e6, torch.randint(4, (8,))
    leaves = x.clone().requires_grad_()
    (ours,) = torch.autograd.grad(OPS.cross_entropy(leaves, target, 0.0, -100, "mean", False)[0], leaves)
    exact = x.double().requires_grad_()
    (theirs,) = torch.autograd.grad(F.cross_entropy(exact, target), exact)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_second_derivatives_are_zero_where_all_rows_are_ignored(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    loss = OPS.cross_entropy(x, torch.full((4,), -100), 0.0, -100, "mean", False)[0]
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    assert gradient.eq(0).all()
    assert torch.autograd.grad(gradient.sum(), x)[0].eq(0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_derivatives_in_16_bits_are_rounded_once(activation: str, dtype: torch.dtype) -> None:
    x = torch.cat((torch.linspace(-8, 8, 500), torch.tensor([-6e4, -720.0, 700.0, 6e4]))).to(dtype)[:, None]
    leaves, exact, one = x.clone().requires_grad_(), x.double().requires_grad_(), torch.ones(1, 1, dtype=dtype)
    (theirs,) = torch.autograd.grad(activate(exact, activation).sum(), exact)
    limit = torch.finfo(dtype).eps
    for y in (ol.linear(leaves, one, activation=activation), OPS.linear(leaves, one, None, activation, 0.0, True)[0]):
        (ours,) = torch.autograd.grad(y.sum(), leaves)
        torch.testing.assert_close(ours.double(), theirs, rtol=limit, atol=limit)


@pytest.mark.parametrize("training", [1, np.bool_(True), torch.tensor(True)])
def test_training_may_be_any_truth_value(training: Any) -> None:
    x, running = torch.randn(6, 5), (torch.zeros(5), torch.ones(5))
    y = ol.batch_norm(x, *(one.clone() for one in running), training=training)
    assert y.equal(F.batch_norm(x, *running, training=True))


def test_the_fake_of_a_backward_pass_with_mixed_dtypes() -> None:
    x, bits = torch.randn(6, 5), torch.empty(0, 0, dtype=torch.uint8)
    arguments = (x, x, torch.rand(2, 5), bits, torch.ones(5).double(), None, True, "gelu", 0.0)
    torch.library.opcheck(OPS.batch_norm_backward.default, arguments)


MISTAKES: list[tuple[Callable[[Tensor, Tensor], object], str]] = [
    (lambda x, _: ol.relu_dropout(x, torch.rand(9, 9)), r"p=tensor\(.* is not a number: pass a probability"),
    (lambda x, _: ol.relu_dropout(x, np.zeros((9, 9))), r"p=array\(.* is not a number: pass a probability"),
    (lambda x, _: ol.relu_dropout(x, "p" * 3000), "p='p+ is not a number: pass a probability"),
    (lambda x, _: ol.relu_dropout(x, 10**400), "p=10+ is out of range: pass a probability from 0 to 1"),
    (lambda x, _: ol.linear(x, x, activation=np.array(["relu", "x"])), "activation=array.* is of type ndarray"),
    (lambda x, _: ol.linear(x.to_sparse(), x), "x is of layout torch.sparse_coo: pass a dense tensor"),
    (lambda x, _: ol.relu_dropout(torch.nested.nested_tensor([x, x[:2]])), "x is nested: pass a dense tensor"),
    (lambda x, t: ol.cross_entropy(x, t, ignore_index=2**63), "ignore_index=9223372036854775808 is out of range"),
    (
        lambda x, t: ol.cross_entropy(x, t.float()),
        r"target of torch.float32 .* shape \(4,\).*: pass target.long\(\), if it",
    ),
    (lambda x, t: ol.cross_entropy(x, x[:2]), r"shape \(2, 4\) and logits \(4, 4\): pass equal shapes"),
    (
        lambda x, t: ol.cross_entropy(x, F.one_hot(t, 4)),
        r"which does not fit logits \(4, 4\): pass \(4,\), as target.argmax\(1\)",
    ),
    (
        lambda x, t: ol.cross_entropy(x.view(2, 2, 4), t.view(2, 2)),
        r"pass \(2, 4\), or classes in .* logits.movedim\(-1, 1\)",
    ),
    (lambda x, _: ol.nn.Linear(4, 4, "relu"), "bias='relu' is not a bool: pass activation='relu' by name"),
    (lambda x, _: ol.nn.BatchNorm2d(4, "relu"), "eps='relu' is not a number: pass .*; activation is passed by name"),
    (lambda x, t: ol.cross_entropy(x, t - 5), "target holds -.*, or ignore_index=-"),
    (
        lambda x, _: ol.nn.BatchNorm1d(3)(x),
        r"running_mean has shape \(3,\) and x \(4, 4\): pass .* shape \(4,\), .*, or x of 3 channels",
    ),
    (lambda x, _: ol.nn.BatchNorm1d(4)(x[:1]), r"one value per channel: pass more rows, .* a module's eval\(\)"),
    (lambda x, t: ol.cross_entropy(x, t, ignore_index=1.0), "ignore_index=1.0 is not an integer: pass a class"),
    (lambda x, t: ol.cross_entropy(x, t, reduction=np.array(["mean"])), "reduction=array.* is of type ndarray"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_a_mistake_is_one_line(call: Callable[[Tensor, Tensor], object], message: str) -> None:
    with pytest.raises(OnelaunchError, match=message) as caught:
        call(torch.randn(4, 4), torch.randint(4, (4,)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 240


@pytest.mark.parametrize(
    "call", [lambda x, t: ol.linear(x, x, activation="rellu"), lambda x, t: ol.cross_entropy(x, t, reduction="men")]
)
def test_a_mistake_in_a_compiled_graph_has_the_same_message(call: Callable[[Tensor, Tensor], object]) -> None:
    """Not an error about code that makes the message and cannot be traced."""
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"is not known: pass one of .*; did you mean"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.randn(4, 4), torch.randint(4, (4,)))


def test_an_integer_of_numpy_is_an_index() -> None:
    x, target = torch.randn(4, 4), torch.tensor([0, 1, 2, 3])
    for dtype in (torch.float32, torch.bfloat16):
        ours = ol.cross_entropy(x.to(dtype), target, ignore_index=np.int64(2))
        torch.testing.assert_close(ours, F.cross_entropy(x.to(dtype), target, ignore_index=2))
    prepared = importlib.import_module("onelaunch.ops.cross_entropy")._prepared(x, target, 0.0, np.int64(2), "mean")
    assert type(prepared.sizes[-1]) is int  # it is passed to a compiled kernel unchanged
