"""The chunked loss of a linear layer against PyTorch's two functions, in float64."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onelaunch.ops import linear_cross_entropy
from onelaunch.ops.linear_cross_entropy import linear_cross_entropy_op
from tests.ops.compare import assert_same_with_gradients
from tests.ops.conftest import DTYPES
from tests.pairwise import cases

MODULE = sys.modules["onelaunch.ops.linear_cross_entropy"]  # the package's attribute of this name is the function


def expected_loss(target: torch.Tensor, **options: Any) -> Any:
    def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        logits = F.linear(x, weight, bias).flatten(0, -2)
        loss = F.cross_entropy(logits, target.flatten(), **options)
        return loss.view(target.shape) if options.get("reduction") == "none" else loss

    return reference


def arguments(
    device: torch.device, dtype: torch.dtype, rows: tuple[int, ...], features: int = 12, classes: int = 30
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, bias and target, with one row that does not count."""
    x = torch.randn(*rows, features, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features, device=device) / 4).to(dtype).requires_grad_()
    bias = torch.randn(classes, device=device).to(dtype).requires_grad_()
    target = torch.randint(classes, rows, device=device)
    target.view(-1)[0] = 3
    return x, weight, bias, target


@pytest.mark.parametrize(
    ("dtype", "rows", "reduction", "smoothing", "has_bias", "ignore_index"),
    cases([torch.float64, *DTYPES], [(20,), (3, 7), (70,)], ["mean", "sum", "none"], [0.0, 0.1], [True, False], [-100, 3]),
)  # fmt: skip
def test_values_and_gradients(
    device: torch.device, dtype: torch.dtype, rows: Any, reduction: str, smoothing: float, has_bias: bool,
    ignore_index: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(MODULE, "CHUNK_BYTES", 1)  # chunks of 64 rows, the fewest
    x, weight, bias, target = arguments(device, dtype, rows)
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}
    loss = linear_cross_entropy(x, weight, target, bias if has_bias else None, **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    inputs = [x, weight, bias] if has_bias else [x, weight]
    upstream = torch.rand_like(loss) if reduction == "none" else torch.full_like(loss, 2.0)
    assert_same_with_gradients(loss, inputs, expected_loss(target, **options), dtype, upstream)


@pytest.mark.parametrize("rows", [(5,), (2, 3)])
def test_no_features(rows: tuple[int, ...]) -> None:
    x, weight, bias, target = arguments(torch.device("cpu"), torch.float64, rows, features=0)
    loss = linear_cross_entropy(x, weight, target, bias)
    inputs = [x, weight, bias]
    assert_same_with_gradients(loss, inputs, expected_loss(target), torch.float64, torch.ones_like(loss))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 129])
def test_chunk_borders(device: torch.device, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "CHUNK_BYTES", 1)
    assert MODULE.chunk_rows(1000, 30, 4) == 64
    x, weight, bias, target = arguments(device, torch.float32, (rows,))
    loss = linear_cross_entropy(x, weight, target, bias)
    assert_same_with_gradients(loss, [x, weight, bias], expected_loss(target), torch.float32)


def test_rows_of_a_chunk() -> None:
    assert MODULE.chunk_rows(8192, 50257, 2) == 960  # nine equal chunks
    assert MODULE.chunk_rows(500, 10**9, 4) == 64


def test_nothing_counts_gives_what_pytorch_gives(device: torch.device) -> None:
    x, weight, bias, target = arguments(device, torch.float32, (5,))
    loss = linear_cross_entropy(x, weight, torch.full_like(target, -100), bias)
    assert loss.isnan()
    loss.backward()
    assert x.grad is not None
    assert not x.grad.any()
    assert linear_cross_entropy(x[:0], weight, target[:0], bias, reduction="sum") == 0
    assert linear_cross_entropy(x[:0], weight, target[:0], bias).isnan()


def test_one_row_without_a_batch(device: torch.device) -> None:
    x, weight, bias, target = arguments(device, torch.float32, (2,))
    expected = F.cross_entropy(F.linear(x[1], weight, bias), target[1])
    for reduction in ("mean", "none"):
        torch.testing.assert_close(linear_cross_entropy(x[1], weight, target[1], bias, reduction=reduction), expected)


def test_gradients_only_for_what_needs_them(device: torch.device) -> None:
    x, weight, bias, target = arguments(device, torch.float32, (9,))
    loss = linear_cross_entropy(x.detach(), weight, target, bias.detach())
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(x, weight, bias), target), weight)[0]
    torch.testing.assert_close(gradient, expected)
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, target).requires_grad


def test_a_differentiable_gradient_of_tied_embeddings(device: torch.device) -> None:
    """The weight is also what x is computed from."""
    target = torch.arange(6, device=device)
    weight = torch.randn(9, 4, dtype=torch.float64, device=device, requires_grad=True)

    def found(loss: Any) -> list[torch.Tensor]:
        (first,) = torch.autograd.grad(loss(weight[target].tanh(), weight), weight, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), weight)]

    ours = found(lambda x, weight: linear_cross_entropy(x, weight, target))
    for one, other in zip(ours, found(expected_loss(target)), strict=True):
        torch.testing.assert_close(one, other)


def test_second_backward_over_one_graph(device: torch.device) -> None:
    x, weight, _, target = arguments(device, torch.float32, (9,))
    loss = linear_cross_entropy(x, weight, target)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss * 3, x)
    torch.testing.assert_close(second, 3 * first)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradcheck_and_gradgradcheck(reduction: str) -> None:
    x, weight, bias, target = arguments(torch.device("cpu"), torch.float64, (4,), 3, 5)

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, target, bias, label_smoothing=0.1, reduction=reduction)

    assert torch.autograd.gradcheck(loss, (x, weight, bias))
    assert torch.autograd.gradgradcheck(loss, (x, weight, bias))
    assert torch.autograd.gradgradcheck(lambda w: loss(x.detach(), w, bias.detach()), (weight,))


@pytest.mark.parametrize(
    ("dtype", "has_bias", "gradient"), cases([torch.float32, torch.float16], [True, False], [True, False])
)
def test_opcheck(device: torch.device, dtype: torch.dtype, has_bias: bool, gradient: bool) -> None:
    x, weight, bias, target = arguments(device, dtype, (6,))
    if not gradient:
        x, weight, bias = x.detach(), weight.detach(), bias.detach()
    options = (0.1, -100, "mean", gradient)
    torch.library.opcheck(linear_cross_entropy_op, (x, weight, bias if has_bias else None, target, *options))


def test_in_a_compiled_function(device: torch.device) -> None:
    x, weight, bias, target = arguments(device, torch.float32, (9,))
    compiled = torch.compile(
        lambda x: linear_cross_entropy(x * 2, weight, target, bias), backend="aot_eager", fullgraph=True
    )
    assert_same_with_gradients(
        compiled(x),
        [x],
        lambda x: F.cross_entropy(F.linear(2 * x, weight.double(), bias.double()), target),
        torch.float32,
    )


def test_in_transforms() -> None:
    x, weight, bias, target = arguments(torch.device("cpu"), torch.float64, (5,))
    x, weight, bias = x.detach(), weight.detach(), bias.detach()
    got = torch.func.grad(lambda w: linear_cross_entropy(x, w, target, bias))(weight)
    expected = torch.func.grad(lambda w: F.cross_entropy(F.linear(x, w, bias), target))(weight)
    torch.testing.assert_close(got, expected)


def test_autocast(device: torch.device) -> None:
    x, weight, bias, target = arguments(device, torch.float32, (9,))
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(x, weight, target, bias)
        exact = linear_cross_entropy(x.double(), weight.double(), target, bias.double())
    assert loss.dtype == torch.float32
    assert exact.dtype == torch.float64
    assert_same_with_gradients(loss, [x, weight, bias], expected_loss(target), torch.bfloat16)


def test_fp16_gradients_under_a_loss_scale_do_not_underflow(device: torch.device) -> None:
    x, weight, _, target = arguments(device, torch.float16, (2048,), 8, 4)
    (linear_cross_entropy(x, weight, target) * 65536).backward()
    exact = x.detach().double().requires_grad_()
    (F.cross_entropy(F.linear(exact, weight.detach().double()), target) * 65536).backward()
    assert x.grad is not None
    assert exact.grad is not None
    assert (x.grad.double() - exact.grad).norm() / exact.grad.norm() < 2e-3


def test_strides_and_small_integer_targets(device: torch.device) -> None:
    x, weight, _, target = arguments(device, torch.float32, (9,))
    across = x.detach().t().contiguous().t().requires_grad_()
    loss = linear_cross_entropy(across, weight.detach().t().contiguous().t(), target.to(torch.uint8))
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, weight), target))
    loss.backward()
    assert across.grad is not None


def test_errors_name_the_argument() -> None:
    x, weight, bias, target = arguments(torch.device("cpu"), torch.float32, (4,))
    with pytest.raises(ValueError, match=r"x has shape \(4, 5\) and weight \(30, 12\)"):
        linear_cross_entropy(x[:, :5], weight, target)
    with pytest.raises(ValueError, match=r"target has shape \(3,\).*pass \(4,\)"):
        linear_cross_entropy(x, weight, target[:3])
    with pytest.raises(ValueError, match=r"bias has shape \(3,\)"):
        linear_cross_entropy(x, weight, target, bias[:3])
    with pytest.raises(ValueError, match=r"weight has dtype torch\.float64 and x torch\.float32"):
        linear_cross_entropy(x, weight.double(), target)
    with pytest.raises(TypeError, match=r"target has dtype torch\.float32"):
        linear_cross_entropy(x, weight, target.float())
    with pytest.raises(TypeError, match="target is a list"):
        linear_cross_entropy(x, weight, [1, 2])
    with pytest.raises(TypeError, match="weight is a NoneType"):
        linear_cross_entropy(x, None, target)
    with pytest.raises(ValueError, match="target is on meta"):
        linear_cross_entropy(x, weight, target.to("meta"))
    with pytest.raises(ValueError, match="reduction='avg'"):
        linear_cross_entropy(x, weight, target, reduction="avg")
    with pytest.raises(ValueError, match=r"label_smoothing=1\.5"):
        linear_cross_entropy(x, weight, target, label_smoothing=1.5)
    with pytest.raises(ValueError, match="target holds 37, out of range for logits of 30 classes"):
        linear_cross_entropy(x, weight, target + 34)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_on_the_device(dtype: torch.dtype) -> None:
    """A language model's sizes: the logits of several chunks, with less memory than the logits would take."""
    x, weight, _, target = arguments(torch.device("cuda"), dtype, (4096,), 256, 32_000)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(x, weight, target)
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**27 + 6 * weight.numel() * 4
    assert_same_with_gradients(loss, [x, weight], expected_loss(target), dtype)
