# mypy: disable-error-code="call-arg, arg-type"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import TOLERANCE
from tests.kernels.conftest import DTYPES, kernel_cases, kernel_devices
from tests.kernels.reference import poisoned
from tests.pairwise import cases


@pytest.fixture
def take_long_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the kernel for rows that do not fit into registers take all rows, in several blocks."""
    from onelaunch.kernels import cross_entropy, cross_entropy_long

    def take() -> None:
        monkeypatch.setattr(cross_entropy, "REGISTER_CLASSES", 1)
        monkeypatch.setattr(cross_entropy_long, "LOOP_BLOCK", {2: 64, 4: 64})

    return take


@pytest.mark.parametrize(
    ("kernel_device", "dtype", "shape", "smoothing", "reduction"),
    kernel_cases(
        # rows, classes, as long rows; only few of these, because one program per row is slow in the interpreter
        [(70, 10, False), (9, 300, False), (5, 304, False), (150, 33, False), (9, 300, True), (5, 304, True)],
        [0.0, 0.1],
        ["mean", "sum", "none"],
    ),
)
def test_loss_and_gradient(
    kernel_device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, bool],
    smoothing: float,
    reduction: str,
    take_long_rows: Callable[[], None],
) -> None:
    from onelaunch.kernels import cross_entropy as kernels
    from onelaunch.kernels import cross_entropy_backward as backward

    rows, classes, long_rows = shape
    if long_rows:
        take_long_rows()
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


INTERPRETED_MANY_ROWS = [
    (torch.float32, (3000, 10)),
    (torch.float16, (3000, 10)),
    (torch.float32, (33_001, 3)),
]


@pytest.mark.parametrize(
    ("kernel_device", "dtype", "shape"),
    [
        case
        for case in kernel_cases([(3000, 10), (33_001, 3), (65_537, 10), (32_769, 32), (100_001, 12)])
        # The interpreter is slow: of more than 32,768 rows, which take larger tiles, it gets one case.
        if case.values[0].type == "cuda" or case.values[1:] in INTERPRETED_MANY_ROWS
    ],
)
def test_many_rows_of_few_classes(kernel_device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """A second kernel adds the sums of many programs. The gradient is that of a sum: a mean's is below the tolerance."""
    from onelaunch.kernels.cross_entropy import cross_entropy_forward

    rows, classes = shape
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


STRIDED_ROWS = [  # classes, row stride, first element
    (1, 1, 0), (1, 3, 1), (2, 2, 0), (2, 2, 1), (5, 8, 0), (8, 8, 0), (8, 12, 4), (8, 9, 1), (16, 20, 2), (24, 24, 0),
    (31, 32, 1), (32, 32, 0), (32, 48, 8),
]  # fmt: skip


@pytest.mark.parametrize(("kernel_device", "dtype", "strided_rows", "rows"), kernel_cases(STRIDED_ROWS, [7, 1031]))
def test_few_classes_of_any_stride_and_start(
    kernel_device: torch.device, dtype: torch.dtype, strided_rows: tuple[int, int, int], rows: int
) -> None:
    """Rows are loaded in the widest pieces that their length, their stride and their first address allow."""
    from onelaunch.kernels.cross_entropy import cross_entropy_forward

    classes, row_stride, start = strided_rows
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


def offset_cases() -> list[Any]:
    """Pairwise cases of (device, (dtype, offset that it can hold), classes, long rows, smoothing)."""
    offsets = (0.0, 4e3, -3e4, 1e6, -1e9, 3e38)
    return [
        pytest.param(*device.values, *case, marks=device.marks)
        for device in kernel_devices()
        for case in cases(
            [
                (dtype, offset)
                for dtype in DTYPES[device.values[0].type]
                for offset in offsets
                if abs(offset) <= torch.finfo(dtype).max
            ],
            [10, 300, 304],
            [False, True],
            [0.0, 0.1],
        )
    ]


@pytest.mark.parametrize(("kernel_device", "dtype_and_offset", "classes", "long_rows", "smoothing"), offset_cases())
def test_logits_far_from_zero_keep_their_digits(
    kernel_device: torch.device,
    dtype_and_offset: tuple[torch.dtype, float],
    classes: int,
    long_rows: bool,
    smoothing: float,
    take_long_rows: Callable[[], None],
) -> None:
    """The maximum must be subtracted first, as in PyTorch, or fp32 loses the digits below the offset."""
    from onelaunch.kernels import cross_entropy as kernels
    from onelaunch.kernels import cross_entropy_backward as backward

    if long_rows:
        take_long_rows()
    dtype, offset = dtype_and_offset
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
@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")  # NumPy's, in the interpreter: -inf is correct
def test_label_smoothing_of_logits_at_the_ends_of_fp32(
    kernel_device: torch.device, row: list[float], long_rows: bool, take_long_rows: Callable[[], None]
) -> None:
    from onelaunch.kernels import cross_entropy as kernels

    if long_rows:
        take_long_rows()
    x, target = torch.tensor([row], device=kernel_device), torch.tensor([1], device=kernel_device)
    loss = poisoned(1, like=x)
    options = {"smoothing": 0.1, "ignore_index": -100, "reduction": "none"}
    kernels.cross_entropy_forward(x, target, loss, lse=None, dx=None, **options)
    expected = F.cross_entropy(x.cpu().double(), target.cpu(), label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel_device", "dtype", "shape", "long_rows", "smoothing"),
    kernel_cases([(1, 37), (3, 101), (9, 257), (4, 300), (3, 1001)], [False, True], [0.0, 0.1]),
)
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value encountered in subtract")  # the interpreter's
def test_rows_that_share_pieces_of_memory(
    kernel_device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    long_rows: bool,
    smoothing: float,
    take_long_rows: Callable[[], None],
) -> None:
    """Rows are loaded in pieces of 16 bytes, which include elements of neighbouring rows.

    A NaN in one row must not reach its neighbours, and nothing may be written before the first row or after the last.
    """
    from onelaunch.kernels import cross_entropy as kernels
    from onelaunch.kernels import cross_entropy_backward as backward
    from onelaunch.kernels.cross_entropy_row_tiles import shifted_pieces

    rows, classes = shape
    assert shifted_pieces(classes, classes, dtype.itemsize) == (
        16 // dtype.itemsize,
        classes * dtype.itemsize % 16 != 0,
    )
    if long_rows:
        take_long_rows()
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
def test_rows_that_are_counted_first_need_no_rescaling(
    kernel_device: torch.device, rows: int, classes: int, long_rows: bool, take_long_rows: Callable[[], None]
) -> None:
    from onelaunch.kernels import cross_entropy as kernels

    if long_rows:
        take_long_rows()
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
def test_the_op_that_writes_its_gradient_in_the_forward_pass(
    kernel_device: torch.device, rows: int, classes: int, reduction: str
) -> None:
    """The eager CUDA path, also in the interpreter: rows counted before or after, one program, several, long rows."""
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
        (expected_dx,) = torch.autograd.grad(expected, exact, upstream.cpu().double(), retain_graph=True)
        torch.testing.assert_close(dx.cpu().double(), expected_dx, rtol=2e-5, atol=1e-6)


def test_an_ignored_row_has_no_gradient_where_the_upstream_gradient_is_infinite(kernel_device: torch.device) -> None:
    from onelaunch.ops.cross_entropy import _EagerCrossEntropy

    x = torch.randn(4, 7, device=kernel_device, requires_grad=True)
    target = torch.tensor([1, -100, 2, 3], device=kernel_device)
    loss = _EagerCrossEntropy.apply(x, target, (0.0, -100, "none", False))
    (ours,) = torch.autograd.grad(loss.sqrt().sum(), x)
    (theirs,) = torch.autograd.grad(F.cross_entropy(x, target, reduction="none").sqrt().sum(), x)
    assert (ours[1] == 0).all()
    torch.testing.assert_close(ours, theirs)


def test_a_factor_of_one_writes_nothing(kernel_device: torch.device) -> None:
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


@pytest.mark.parametrize(
    ("kernel_device", "dtype", "shape", "smoothing", "reduction"),
    kernel_cases([(1, 1), (32, 64), (300, 10), (8, 511)], [0.0, 0.1], ["mean", "sum"]),
)
def test_a_prepared_small_loss_takes_other_tensors(
    kernel_device: torch.device, dtype: torch.dtype, shape: tuple[int, int], smoothing: float, reduction: str
) -> None:
    """One prepared launch for several calls: other tensors, ignored rows, logits and targets not aligned to 16 bytes."""
    from onelaunch.kernels.cross_entropy import SmallLoss

    rows, classes = shape
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
