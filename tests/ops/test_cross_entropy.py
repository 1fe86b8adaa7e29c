from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onelaunch.nn import CrossEntropyLoss
from onelaunch.ops import cross_entropy
from onelaunch.ops.cross_entropy import cross_entropy_gradient_op, cross_entropy_op
from tests.ops.compare import assert_same_with_gradients
from tests.ops.conftest import DTYPES
from tests.pairwise import cases


@pytest.mark.parametrize(
    ("dtype", "shape", "reduction", "smoothing"),
    cases(DTYPES, [(9,), (40, 10), (17, 1300), (4, 7, 5), (2, 6, 3, 4)], ["mean", "sum", "none"], [0.0, 0.1]),
)
def test_values_and_gradients(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], reduction: str, smoothing: float
) -> None:
    logits = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    classes = shape[0] if len(shape) == 1 else shape[1]
    target = torch.randint(classes, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
    if target.dim():
        target.view(-1)[2] = -100
    loss = cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
    assert loss.dtype == dtype
    upstream = torch.rand_like(loss) if reduction == "none" else torch.full_like(loss, 2.0)
    assert_same_with_gradients(
        loss, [logits],
        lambda exact: F.cross_entropy(exact, target, reduction=reduction, label_smoothing=smoothing),
        dtype, upstream,
    )  # fmt: skip


def test_gradient_of_one_and_a_second_backward(device: torch.device) -> None:
    logits = torch.randn(30, 12, device=device, requires_grad=True)
    target = torch.randint(12, (30,), device=device)
    loss = cross_entropy(logits, target)
    expected = torch.autograd.grad(F.cross_entropy(logits, target), logits)[0]
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss * 3, logits, retain_graph=True)
    (third,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, 3 * expected)
    torch.testing.assert_close(third, expected)


def test_all_rows_ignored_gives_what_pytorch_gives(device: torch.device) -> None:
    logits = torch.randn(4, 5, device=device, requires_grad=True)
    target = torch.full((4,), -100, device=device)
    loss = cross_entropy(logits, target)
    assert loss.isnan()
    loss.backward()
    assert logits.grad is not None
    assert cross_entropy(logits, target, reduction="sum") == 0
    assert cross_entropy(torch.empty(0, 5, device=device), target[:0], reduction="sum") == 0


def test_probabilities_and_small_integer_targets(device: torch.device) -> None:
    logits = torch.randn(4, 5, device=device)
    soft = torch.rand(4, 5, device=device).softmax(1)
    torch.testing.assert_close(cross_entropy(logits, soft), F.cross_entropy(logits, soft))
    target = torch.tensor([0, 1, 2, 4], dtype=torch.uint8, device=device)
    torch.testing.assert_close(cross_entropy(logits, target), F.cross_entropy(logits, target.long()))


def test_autocast_gives_a_float32_loss(device: torch.device) -> None:
    logits = torch.randn(6, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(8, (6,), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = cross_entropy(logits, target)
    assert loss.dtype == torch.float32
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.gpu
def test_fp16_gradient_under_a_loss_scale_does_not_underflow() -> None:
    logits = torch.randn(4096, 1000, device="cuda", dtype=torch.float16, requires_grad=True)
    target = torch.randint(1000, (4096,), device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = cross_entropy(logits, target)
    (loss * 65536).backward()
    exact = logits.detach().double().requires_grad_()
    (F.cross_entropy(exact, target) * 65536).backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert (logits.grad.double() - exact.grad).norm() / exact.grad.norm() < 2e-3


def test_opcheck(device: torch.device) -> None:
    logits, target = torch.randn(6, 10, device=device, requires_grad=True), torch.randint(10, (6,), device=device)
    torch.library.opcheck(cross_entropy_op, (logits, target, 0.1, -100, "mean", False))
    loss, lse, count = cross_entropy_op(logits.detach(), target, 0.1, -100, "none", False)
    arguments = (torch.ones_like(loss), logits.detach(), target, lse, count, 0.1, -100, "none")
    torch.library.opcheck(cross_entropy_gradient_op, arguments)


def test_errors_name_the_argument() -> None:
    logits, target = torch.randn(4, 5), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="reduction='avg'"):
        cross_entropy(logits, target, reduction="avg")
    with pytest.raises(ValueError, match=r"target has shape \(3,\)"):
        cross_entropy(logits, target[:3])
    with pytest.raises(ValueError, match=r"label_smoothing=1\.5"):
        cross_entropy(logits, target, label_smoothing=1.5)
    with pytest.raises(ValueError, match="target is on meta"):
        cross_entropy(logits, target.to("meta"))
    with pytest.raises(TypeError, match="label_smoothing=None is not a number"):
        cross_entropy(logits, target, label_smoothing=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ignore_index=1\.5 is not an integer"):
        cross_entropy(logits, target, ignore_index=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="target holds 7, out of range for logits of 5 classes: pass 0 to 4"):
        cross_entropy(logits, target + 7)
    with pytest.raises(ValueError, match=r"target holds 0, .* 0 classes: pass logits of one class or more"):
        cross_entropy(logits[:, :0], target)
    with pytest.raises(ValueError, match=r"label_smoothing=3\.0"):
        CrossEntropyLoss(label_smoothing=3.0)
    with pytest.raises(
        ValueError, match=r"weight is given, and class weights are not fused: use torch\.nn\.functional"
    ):
        cross_entropy(logits, target, weight=torch.ones(5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="class weights are not fused"):
        CrossEntropyLoss(torch.ones(5))  # type: ignore[arg-type]


def test_module() -> None:
    module = CrossEntropyLoss(label_smoothing=0.1)
    assert module.state_dict() == nn.CrossEntropyLoss().state_dict()
    logits, target = torch.randn(4, 5), torch.zeros(4, dtype=torch.int64)
    torch.testing.assert_close(module(logits, target), nn.CrossEntropyLoss(label_smoothing=0.1)(logits, target))
    assert "one pass" in repr(module)


def test_the_same_small_call_again_with_other_tensors(device: torch.device) -> None:
    """The launch prepared for the first call fits the others: in any layout, under autocast, without gradient."""
    for number in range(8):
        logits = torch.randn(10, 24, device=device).t() if number == 2 else torch.randn(24, 10, device=device)
        target = (
            torch.randint(10, (48,), device=device)[::2] if number == 3 else torch.randint(10, (24,), device=device)
        )
        target[number] = -100
        logits.requires_grad_(number != 4)
        exact = logits.detach().double().requires_grad_()
        expected = F.cross_entropy(exact, target)
        with torch.autocast(device.type, torch.bfloat16, enabled=number == 5):
            loss = cross_entropy(logits, target)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        if number == 4:
            assert not loss.requires_grad
            continue
        (loss * 3).backward()
        (expected * 3).backward()
        assert logits.grad is not None
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)
