# mypy: disable-error-code="call-arg, arg-type"
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import TOLERANCE
from tests.kernels.reference import poisoned


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "classes"), [(70, 10), (9, 300), (5, 304), (300, 33)])
@pytest.mark.parametrize("long_rows", [False, True])
def test_loss_and_gradient(
    kernel_device: torch.device,
    dtype: torch.dtype,
    rows: int,
    classes: int,
    smoothing: float,
    reduction: str,
    long_rows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from onelaunch.kernels import cross_entropy as kernels
    from onelaunch.kernels import cross_entropy_backward as backward
    from onelaunch.kernels import cross_entropy_long

    if long_rows:
        if rows > 50:
            pytest.skip("a program a row is slow in the interpreter")
        monkeypatch.setattr(kernels, "REGISTER_CLASSES", 1)
        monkeypatch.setattr(cross_entropy_long, "LOOP_BLOCK", {2: 64, 4: 64})
    x = torch.randn(rows, classes, device=kernel_device, dtype=dtype)
    target = torch.randint(classes, (rows,), device=kernel_device)
    target[3] = -100
    exact = x.cpu().double().requires_grad_()
    expected = F.cross_entropy(exact, target.cpu(), label_smoothing=smoothing, reduction=reduction)
    upstream = (
        torch.rand(rows, device=kernel_device) if reduction == "none" else torch.tensor(1.7, device=kernel_device)
    )
    expected.backward(upstream.cpu().double())

    loss = poisoned(*([rows] if reduction == "none" else []), like=upstream)
    lse, dx = poisoned(rows, 2, like=upstream), poisoned(rows, classes, like=x)
    options = {"smoothing": smoothing, "ignore_index": -100}
    count = kernels.cross_entropy_forward(x, target, loss, lse=lse, dx=dx, reduction=reduction, **options)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    if reduction != "none":
        backward.rescale(dx, upstream, count if reduction == "mean" else None, dx, rows)
        torch.testing.assert_close(dx.cpu().double(), exact.grad, rtol=2 * rtol, atol=atol)

    again = poisoned(rows, classes, like=x)
    counted = torch.tensor([rows - 1.0], device=kernel_device) if reduction == "mean" else None
    backward.cross_entropy_gradient(x, target, lse, upstream, counted, again, **options)
    torch.testing.assert_close(again.cpu().double(), exact.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("rows", "classes"), [(3000, 10), (33_001, 3), (65_537, 10), (32_769, 32), (100_001, 12)])
def test_many_rows_of_few_classes(kernel_device: torch.device, dtype: torch.dtype, rows: int, classes: int) -> None:
    """Many programs, whose sums are added up by one more; the gradient of a sum, since a mean's lies below the tolerance."""
    from onelaunch.kernels.cross_entropy import cross_entropy_forward

    if kernel_device.type == "cpu" and rows * classes > 100_000:
        pytest.skip("hundreds of programs are slow in the interpreter")
    x = torch.randn(rows, classes, device=kernel_device, dtype=dtype)
    target = torch.randint(classes, (rows,), device=kernel_device)
    target[::7] = -100
    exact = x.cpu().double().requires_grad_()
    F.cross_entropy(exact, target.cpu(), reduction="sum").backward()
    options = {"smoothing": 0.0, "ignore_index": -100}
    for reduction in ("sum", "mean"):
        loss, dx = poisoned(like=x.float()), poisoned(rows, classes, like=x)
        count = cross_entropy_forward(x, target, loss, lse=None, dx=dx, reduction=reduction, **options)
        expected = F.cross_entropy(exact.detach(), target.cpu(), reduction=reduction)
        torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)
        assert count is not None
        assert count[0].item() == (target != -100).sum().item()
        if reduction == "sum":
            rtol, atol = TOLERANCE[dtype]
            torch.testing.assert_close(dx.cpu().double(), exact.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("classes", "row_stride", "start"),
    [(1, 1, 0), (1, 3, 1), (2, 2, 0), (2, 2, 1), (5, 8, 0), (8, 8, 0), (8, 12, 4), (8, 9, 1), (16, 20, 2), (24, 24, 0),
     (31, 32, 1), (32, 32, 0), (32, 48, 8)],
)  # fmt: skip
@pytest.mark.parametrize("rows", [7, 2057])
def test_few_classes_of_any_stride_and_start(
    kernel_device: torch.device, dtype: torch.dtype, rows: int, classes: int, row_stride: int, start: int
) -> None:
    """Rows are loaded in the widest pieces that their size, their distance and their first address allow."""
    from onelaunch.kernels.cross_entropy import cross_entropy_forward

    memory = torch.randn(rows * row_stride + 64, device=kernel_device, dtype=dtype)
    x = memory.as_strided((rows, classes), (row_stride, 1), start)
    target = torch.randint(classes, (rows,), device=kernel_device)
    target[::5] = -100
    x[1] = float("-inf")
    x[1, 0], target[1] = 2.0, 0  # one class left: no loss, no gradient
    exact = x.cpu().double().requires_grad_()
    expected = F.cross_entropy(exact, target.cpu(), reduction="sum", label_smoothing=0.0)
    expected.backward()
    loss, dx, lse = poisoned(like=x.float()), poisoned(rows, classes, like=x), poisoned(rows, 2, like=x.float())
    cross_entropy_forward(x, target, loss, lse=lse, dx=dx, smoothing=0.0, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double().sum(1), exact.detach().logsumexp(1), rtol=1e-5, atol=1e-5)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(dx.cpu().double(), exact.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("offset", [0.0, 4e3, -3e4, 1e6, -1e9, 3e38])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [10, 300, 304])
@pytest.mark.parametrize("long_rows", [False, True])
def test_logits_far_from_zero_keep_their_digits(
    kernel_device: torch.device,
    dtype: torch.dtype,
    classes: int,
    long_rows: bool,
    smoothing: float,
    offset: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch takes the largest off first; so must we, or fp32 loses what the offset takes."""
    from onelaunch.kernels import cross_entropy as kernels
    from onelaunch.kernels import cross_entropy_backward as backward
    from onelaunch.kernels import cross_entropy_long

    if abs(offset) > torch.finfo(dtype).max:
        pytest.skip("beyond what the dtype holds")
    if long_rows:
        monkeypatch.setattr(kernels, "REGISTER_CLASSES", 1)
        monkeypatch.setattr(cross_entropy_long, "LOOP_BLOCK", {2: 64, 4: 64})
    x = (torch.randn(6, classes, device=kernel_device) * 3 + offset).to(dtype)
    x[5] = -torch.finfo(dtype).max
    target = x.argmax(dim=1)
    exact = x.cpu().double().requires_grad_()
    expected = F.cross_entropy(exact, target.cpu(), label_smoothing=smoothing, reduction="sum")
    expected.backward()
    loss, lse, dx, again = (poisoned(*shape, like=like) for shape, like in (
        ((), x.float()), ((6, 2), x.float()), ((6, classes), x), ((6, classes), x)
    ))  # fmt: skip
    options = {"smoothing": smoothing, "ignore_index": -100}
    kernels.cross_entropy_forward(x, target, loss, lse=lse, dx=dx, reduction="sum", **options)
    backward.cross_entropy_gradient(x, target, lse, torch.ones_like(loss), None, again, **options)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    for gradient in (dx, again):
        torch.testing.assert_close(gradient.cpu().double(), exact.grad, rtol=rtol, atol=min(atol, 1e-4))


@pytest.mark.parametrize("long_rows", [False, True])
@pytest.mark.parametrize("row", [[3e38, 3e38, 0.0], [1e38, 3e38, 2e38], [float("-inf"), 2.0, 1.0], [-3e38, 3.0, 5.0]])
@pytest.mark.filterwarnings(
    "ignore:overflow encountered in multiply"
)  # NumPy's, in the interpreter: -inf is right there
def test_smoothing_over_logits_at_the_ends_of_fp32(
    kernel_device: torch.device, row: list[float], long_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onelaunch.kernels import cross_entropy as kernels

    if long_rows:
        monkeypatch.setattr(kernels, "REGISTER_CLASSES", 1)
    x, target = torch.tensor([row], device=kernel_device), torch.tensor([1], device=kernel_device)
    loss = poisoned(1, like=x)
    options = {"smoothing": 0.1, "ignore_index": -100, "reduction": "none"}
    kernels.cross_entropy_forward(x, target, loss, lse=None, dx=None, **options)
    expected = F.cross_entropy(x.cpu().double(), target.cpu(), label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "classes"), [(1, 37), (3, 101), (9, 257), (4, 300), (3, 1001)])
@pytest.mark.parametrize("long_rows", [False, True])
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value encountered in subtract")  # the interpreter's
def test_rows_that_share_pieces_of_memory(
    kernel_device: torch.device,
    dtype: torch.dtype,
    rows: int,
    classes: int,
    smoothing: float,
    long_rows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loaded 16 bytes at a time, with what belongs to the rows beside them: NaN there, and in a row, goes no further, and
    nothing is written before the first row or behind the last."""
    from onelaunch.kernels import cross_entropy as kernels
    from onelaunch.kernels import cross_entropy_backward as backward
    from onelaunch.kernels import cross_entropy_long
    from onelaunch.kernels.cross_entropy_row_tiles import shifted_pieces

    assert shifted_pieces(classes, classes, dtype.itemsize) == (
        16 // dtype.itemsize,
        classes * dtype.itemsize % 16 != 0,
    )
    if long_rows:
        monkeypatch.setattr(kernels, "REGISTER_CLASSES", 1)
        monkeypatch.setattr(cross_entropy_long, "LOOP_BLOCK", {2: 64, 4: 64})
    held, written, again = (
        torch.full((rows * classes + 64,), float("nan"), dtype=dtype, device=kernel_device) for _ in "123"
    )
    x, dx, dx_again = (memory[32:-32].view(rows, classes) for memory in (held, written, again))
    x.normal_()
    target = torch.randint(classes, (rows,), device=kernel_device)
    target[-1], target[0] = classes - 1, 0
    exact = x.cpu().double().requires_grad_()
    F.cross_entropy(exact, target.cpu(), label_smoothing=smoothing, reduction="sum").backward()
    assert exact.grad is not None
    spoiled = slice(rows // 2, rows // 2 + (rows > 1))
    x[spoiled] = float("nan")
    expected = F.cross_entropy(x.cpu().double(), target.cpu(), label_smoothing=smoothing, reduction="none")

    loss, lse = poisoned(rows, like=x.float()), poisoned(rows, 2, like=x.float())
    options = {"smoothing": smoothing, "ignore_index": -100}
    kernels.cross_entropy_forward(x, target, loss, lse=lse, dx=dx, reduction="none", **options)
    backward.cross_entropy_gradient(x, target, lse, torch.ones_like(loss), None, dx_again, **options)
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    rtol, atol = TOLERANCE[dtype]
    exact.grad[spoiled] = float("nan")
    for gradient, memory in ((dx, written), (dx_again, again)):
        torch.testing.assert_close(gradient.cpu().double(), exact.grad, rtol=rtol, atol=min(atol, 1e-4), equal_nan=True)
        assert memory[:32].isnan().all()
        assert memory[-32:].isnan().all()


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (5, 4), (1030, 2), (9000, 4)])
def test_rows_are_counted(kernel_device: torch.device, rows: int, parts: int) -> None:
    from onelaunch.kernels.cross_entropy import count_rows

    target = torch.randint(4, (rows,), device=kernel_device)
    for ignored in (0, 2, -100):
        counts = poisoned(parts, like=target, dtype=torch.float32)
        count_rows(target, ignored, counts)
        assert counts.sum().item() == (target != ignored).sum().item()


@pytest.mark.parametrize(("rows", "classes", "long_rows"), [(3, 600, False), (50, 600, False), (5, 600, True)])
def test_rows_that_are_counted_first_leave_nothing_to_rescale(
    kernel_device: torch.device, rows: int, classes: int, long_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onelaunch.kernels import cross_entropy as kernels

    if long_rows:
        monkeypatch.setattr(kernels, "REGISTER_CLASSES", 1)
    x = torch.randn(rows, classes, device=kernel_device)
    target = torch.randint(classes, (rows,), device=kernel_device)
    target[::2] = 7
    exact = x.cpu().double().requires_grad_()
    expected = F.cross_entropy(exact, target.cpu(), ignore_index=7)
    expected.backward()
    loss, dx = poisoned(like=x), poisoned(rows, classes, like=x)
    options = {"lse": None, "smoothing": 0.0, "ignore_index": 7, "reduction": "mean", "count_first": True}
    kernels.cross_entropy_forward(x, target, loss, dx=dx, **options)
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dx.cpu().double(), exact.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("rows", "classes"), [(3, 600), (50, 600), (700, 20), (2, 9000)])
def test_the_op_that_writes_its_gradient_in_the_forward(
    kernel_device: torch.device, rows: int, classes: int, reduction: str
) -> None:
    """What runs on CUDA, also in the interpreter: rows counted first or afterwards, one program, parts, rows past registers."""
    from onelaunch.ops.cross_entropy import _EagerCrossEntropy

    x = torch.randn(rows, classes, device=kernel_device, requires_grad=True)
    target = torch.randint(classes, (rows,), device=kernel_device)
    target[1] = -100
    loss = _EagerCrossEntropy.apply(x, target, (0.1, -100, reduction, False))
    exact = x.detach().cpu().double().requires_grad_()
    expected = F.cross_entropy(exact, target.cpu(), label_smoothing=0.1, reduction=reduction)
    torch.testing.assert_close(loss.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for factor in (1.0, 1.7):
        upstream = torch.full_like(loss, factor)
        (dx,) = torch.autograd.grad(loss, x, upstream, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected, exact, upstream.cpu().double(), retain_graph=True)
        torch.testing.assert_close(dx.cpu().double(), wanted, rtol=2e-5, atol=1e-6)


def test_an_ignored_row_has_no_gradient_where_the_upstream_one_is_infinite(kernel_device: torch.device) -> None:
    from onelaunch.ops.cross_entropy import _EagerCrossEntropy

    x = torch.randn(4, 7, device=kernel_device, requires_grad=True)
    target = torch.tensor([1, -100, 2, 3], device=kernel_device)
    loss = _EagerCrossEntropy.apply(x, target, (0.0, -100, "none", False))
    (ours,) = torch.autograd.grad(loss.sqrt().sum(), x)
    (theirs,) = torch.autograd.grad(F.cross_entropy(x, target, reduction="none").sqrt().sum(), x)
    assert (ours[1] == 0).all()
    torch.testing.assert_close(ours, theirs)


def test_a_factor_of_one_touches_nothing(kernel_device: torch.device) -> None:
    from onelaunch.kernels.cross_entropy_backward import rescale

    dx, out = torch.randn(100, 10, device=kernel_device), torch.full((100, 10), 5.0, device=kernel_device)
    rescale(dx, torch.ones((), device=kernel_device), None, out, 100)
    assert (out == 5).all()


def test_a_target_out_of_range_makes_the_loss_nan(kernel_device: torch.device) -> None:
    from onelaunch.kernels.cross_entropy import cross_entropy_forward

    x = torch.randn(4, 10, device=kernel_device)
    loss = torch.zeros(4, device=kernel_device)
    target = torch.tensor([0, 10, -1, 9], device=kernel_device)
    cross_entropy_forward(x, target, loss, lse=None, dx=None, smoothing=0.0, ignore_index=-100, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (32, 64), (300, 10), (8, 511)])
def test_a_small_loss_again_and_again(
    kernel_device: torch.device, dtype: torch.dtype, rows: int, classes: int, smoothing: float, reduction: str
) -> None:
    """One prepared launch for all: other tensors, rows to ignore, logits and targets that do not lie on 16 bytes."""
    from onelaunch.kernels.cross_entropy import SmallLoss

    assert SmallLoss.takes(rows, classes)
    held = torch.empty(rows * classes + 1, device=kernel_device, dtype=dtype)
    targets = torch.empty(rows + 1, device=kernel_device, dtype=torch.int64)
    fill = None
    for x_from, target_from in ((0, 0), (0, 0), (1, 0), (0, 0), (0, 1), (0, 0)):
        x = held[x_from : x_from + rows * classes].view(rows, classes).normal_()
        target = targets[target_from : target_from + rows].random_(classes)
        target[rows // 2 + 1 :: 3] = -100
        fill = fill or SmallLoss(x, smoothing=smoothing, ignore_index=-100, reduction=reduction)
        loss, dx = poisoned(like=x.float()), poisoned(rows, classes, like=x)
        fill(x, target, loss, dx)
        exact = x.cpu().double().requires_grad_()
        expected = F.cross_entropy(exact, target.cpu(), label_smoothing=smoothing, reduction=reduction)
        expected.backward()
        rtol, atol = TOLERANCE[dtype]
        torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dx.cpu().double(), exact.grad, rtol=rtol, atol=atol)
