from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onelaunch.nn import ReLUDropout
from onelaunch.ops import relu_dropout
from onelaunch.ops.relu_dropout import relu_dropout_op, relu_dropout_reference
from tests.ops.compare import assert_same_with_gradients
from tests.ops.conftest import DTYPES
from tests.pairwise import cases

SHAPES = [(1,), (7, 5), (3, 4, 33), (2, 3, 4, 5, 6)]


@pytest.mark.parametrize(("dtype", "shape", "p"), cases(DTYPES, SHAPES, [0.0, 0.25, 1.0]))
def test_values_and_gradients(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], p: float) -> None:
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    y = relu_dropout(x, p)
    keep = (y != 0) | (x.detach() <= 0)
    assert_same_with_gradients(y, [x], lambda exact: relu_dropout_reference(exact, keep, p), dtype)


def test_any_stride(device: torch.device) -> None:
    base = torch.randn(4, 6, 8, 10, device=device)
    for x in (
        base.transpose(1, 3),
        base[:, ::2],
        base[..., 1:9],
        base.to(memory_format=torch.channels_last),
        base[:1].expand(4, 6, 8, 10),
    ):
        leaf = x.detach().requires_grad_()
        y = relu_dropout(leaf, 0.5)
        assert y.shape == x.shape
        kept = y != 0
        torch.testing.assert_close(y, torch.where(kept, x.relu() * 2, 0))
        dy = torch.randn(x.shape, device=device)
        (gradient,) = torch.autograd.grad(y, leaf, dy)
        torch.testing.assert_close(gradient, torch.where(kept, dy * 2, 0))
    assert relu_dropout(base.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)


def test_empty_and_evaluation(device: torch.device) -> None:
    assert relu_dropout(torch.empty(0, 5, device=device, requires_grad=True), 0.5).shape == (0, 5)
    x = torch.randn(100, device=device)
    assert torch.equal(relu_dropout(x, 0.5, training=False), F.relu(x))


def test_double_backward(device: torch.device) -> None:
    x = torch.randn(200, device=device, requires_grad=True)
    v = torch.randn(200, device=device, requires_grad=True)
    y = relu_dropout(x, 0.5)
    (dx,) = torch.autograd.grad(y, x, v, create_graph=True)
    (dv,) = torch.autograd.grad(dx.square().sum(), v)
    torch.testing.assert_close(dv, torch.where(y != 0, v * 8, 0))


def test_in_place(device: torch.device) -> None:
    start = torch.randn(50, 8, device=device, requires_grad=True)
    x = start * 1
    values = x.detach().clone()
    y = relu_dropout(x, 0.5, inplace=True)
    assert y.data_ptr() == x.data_ptr()
    kept = y.detach() != 0
    torch.testing.assert_close(x, torch.where(kept, values.relu() * 2, 0))
    y.sum().backward()
    torch.testing.assert_close(start.grad, torch.where(kept, 2.0, 0.0))
    with pytest.raises(RuntimeError, match="leaf"):
        relu_dropout(start, 0.5, inplace=True)
    strided = torch.randn(8, 10, device=device)[:, ::2]
    before = strided.clone()
    relu_dropout(strided, 0.5, inplace=True)
    torch.testing.assert_close(strided, torch.where(strided != 0, before.relu() * 2, 0))


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_keep_rate_and_neighbours(device: torch.device, p: float) -> None:
    n = 2**18
    kept = relu_dropout(torch.ones(n, device=device), p) != 0
    assert abs(kept.double().mean() - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5
    # Chi-square of the 16 patterns of four neighbours, 15 degrees of freedom: 44.3 is exceeded once in 10,000.
    patterns = (kept.view(-1, 4).int() * torch.tensor([1, 2, 4, 8], device=device)).sum(1)
    counts = torch.bincount(patterns, minlength=16).double().cpu()
    ones = torch.tensor([bin(k).count("1") for k in range(16)])
    expected = (1 - p) ** ones * p ** (4 - ones) * (n / 4)
    assert ((counts - expected).square() / expected).sum() < 44.3


def test_masks_follow_the_seed_and_differ_between_calls_and_rows(device: torch.device) -> None:
    x = torch.ones(64, 256, device=device)
    torch.manual_seed(3)
    first, second = relu_dropout(x), relu_dropout(x)
    torch.manual_seed(3)
    assert torch.equal(relu_dropout(x), first)
    assert not torch.equal(first, second)
    assert torch.unique(first, dim=0).shape[0] == 64
    torch.manual_seed(4)
    assert not torch.equal(relu_dropout(x), first)


def test_opcheck(device: torch.device) -> None:
    torch.library.opcheck(relu_dropout_op, (torch.randn(6, 10, device=device, requires_grad=True), 0.4))


def test_errors_name_the_argument() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"p=1\.5"):
        relu_dropout(x, 1.5)
    with pytest.raises(TypeError, match="p='a'"):
        relu_dropout(x, "a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x has dtype torch\.int64"):
        relu_dropout(torch.ones(3, dtype=torch.int64))


def test_module() -> None:
    module = ReLUDropout(0.25)
    assert module.state_dict() == {}
    assert "fused" in repr(module)
    assert (module(torch.ones(1000)) == 0).any()
    module.eval()
    assert torch.equal(module(torch.ones(10)), torch.ones(10))
