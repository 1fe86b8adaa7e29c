# mypy: disable-error-code="call-arg, arg-type"
from __future__ import annotations

import pytest
import torch
from torch import nn

from onelaunch.activations import ACTIVATIONS
from onelaunch.nn import BatchNorm1d
from onelaunch.ops import batch_norm
from onelaunch.ops.batch_norm import batch_norm_backward_op, batch_norm_op
from onelaunch.ops.batch_norm_reference import batch_norm_reference
from tests.conftest import TOLERANCE
from tests.ops.compare import assert_same_with_gradients
from tests.ops.conftest import DTYPES
from tests.pairwise import cases


def inputs(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    x = (torch.randn(shape, device=device) * 2 + 1).to(dtype).requires_grad_()
    return [x, *(torch.randn(shape[1], device=device, requires_grad=True) for _ in range(2))]


@pytest.mark.parametrize(
    ("dtype", "activation", "shape", "p", "training"),
    cases(DTYPES, [None, *ACTIVATIONS], [(33, 20), (2000, 17), (4, 6, 10), (3, 5, 6, 7)], [0.0, 0.3], [True, False]),
)
def test_values_and_gradients(
    device: torch.device, dtype: torch.dtype, activation: str | None, shape: tuple[int, ...], p: float, training: bool
) -> None:
    x, weight, bias = inputs(device, dtype, shape)
    if (
        activation == "hardswish"
    ):  # |z| stays below 3, where the derivative jumps and rounding may choose the other side
        weight, bias = ((tensor.detach() * 0.1).requires_grad_() for tensor in (weight, bias))
    mean, var = torch.randn(shape[1], device=device), torch.rand(shape[1], device=device) + 0.5
    y = batch_norm(x, mean.clone(), var.clone(), weight, bias, training=training, activation=activation, dropout=p)

    def reference(*exact: torch.Tensor) -> torch.Tensor:
        x64, weight64, bias64 = exact
        arguments = (x64, mean.double(), var.double(), weight64, bias64, training, 1e-5)
        keep = None
        if p and training:
            keep = y != 0
            if activation in ("relu", "hardswish"):  # where 0 is a value too
                keep = keep | (batch_norm_reference(*arguments, activation, None, 0.0).abs() < 1e-3)
        return batch_norm_reference(*arguments, activation, keep, p)

    assert_same_with_gradients(y, [x, weight, bias], reference, dtype)


def test_channels_last_is_kept(device: torch.device) -> None:
    x, weight, bias = inputs(device, torch.float32, (3, 8, 6, 7))
    x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    y = batch_norm(x, None, None, weight, bias, training=True, activation="tanh")
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_same_with_gradients(
        y, [x, weight, bias],
        lambda *exact: batch_norm_reference(exact[0], None, None, *exact[1:], True, 1e-5, "tanh", None, 0.0),
        torch.float32,
    )  # fmt: skip
    strided = torch.randn(16, 40, device=device)[:, ::2]
    ours = batch_norm(strided, None, None, training=True)
    torch.testing.assert_close(ours, nn.functional.batch_norm(strided, None, None, training=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(16, 6), (4, 6, 5), (3000, 6)])
def test_module_updates_the_running_statistics_as_pytorch_does(
    device: torch.device, momentum: float | None, shape: tuple[int, ...]
) -> None:
    theirs, ours = nn.BatchNorm1d(6, momentum=momentum), BatchNorm1d(6, momentum=momentum, activation="relu")
    theirs, ours = theirs.to(device), ours.to(device)
    ours.load_state_dict(theirs.state_dict())
    for _ in range(3):
        x = torch.randn(shape, device=device) * 3 + 1
        torch.testing.assert_close(ours(x), theirs(x).relu(), rtol=1e-4, atol=1e-5)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x).relu(), rtol=1e-4, atol=1e-5)
    assert "batch_norm + relu" in repr(ours)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_variance_far_below_eps_is_kept_as_it_is(device: torch.device, compiled: bool) -> None:
    x, mean, var = (
        torch.randn(64, 3, device=device) * 1e-5,
        torch.zeros(3, device=device),
        torch.zeros(3, device=device),
    )
    move = torch.compile(batch_norm, backend="aot_eager", fullgraph=True) if compiled else batch_norm
    move(x, mean, var, training=True, momentum=1.0, eps=1e-3, dropout=0.1)
    torch.testing.assert_close(var, x.var(0))
    torch.testing.assert_close(mean, x.mean(0))


@pytest.mark.parametrize("shape", [(40, 1), (3, 1, 21), (2, 1, 3, 5)])
def test_one_channel_saves_one_bit_per_element(device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    y, _, bits = batch_norm_op(x, None, None, None, None, True, 1e-5, None, 0.3)
    assert bits.numel() == (x.numel() + 7) // 8
    keep = y != 0
    expected = batch_norm_reference(x, None, None, None, None, True, 1e-5, None, keep, 0.3)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(one, x, dy, retain_graph=True)[0] for one in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 4), (2, 65_536, 3)])
def test_integer_momentum_and_very_many_channels(device: torch.device, shape: tuple[int, ...]) -> None:
    """A momentum of 1 must not run the kernel specialised for 0.1, and there may be more channels than CUDA's grid allows."""
    x = torch.randn(shape, device=device)
    for momentum, eps in ((1, 1), (0.1, 1e-5), (2, 1e-5), (0.1, 1)):
        ours, theirs = ([torch.zeros(shape[1], device=device), torch.ones(shape[1], device=device)] for _ in range(2))
        y = batch_norm(x, *ours, training=True, momentum=momentum, eps=eps)
        expected = nn.functional.batch_norm(x, theirs[0], theirs[1], None, None, True, momentum, eps)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_opcheck(device: torch.device) -> None:
    x, weight, bias = inputs(device, torch.float32, (6, 5))
    torch.library.opcheck(batch_norm_op, (x, None, None, weight, bias, True, 1e-5, "gelu", 0.3))
    image = torch.randn(2, 3, 4, 4, device=device, requires_grad=True)
    statistics = torch.zeros(3, device=device), torch.ones(3, device=device)
    torch.library.opcheck(batch_norm_op, (image, *statistics, None, None, False, 1e-5, "relu", 0.0))
    dy, saved = torch.randn(6, 5, device=device), torch.rand(2, 5, device=device)
    bits = torch.zeros(6, 1, dtype=torch.uint8, device=device)
    arguments = (dy, x.detach(), saved, bits, weight.detach(), bias.detach(), True, "relu", 0.5)
    torch.library.opcheck(batch_norm_backward_op, arguments)


def test_errors_name_the_argument() -> None:
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="running_mean=None"):
        batch_norm(x, None, None)
    with pytest.raises(ValueError, match=r"weight has shape \(2,\)"):
        batch_norm(x, None, None, torch.ones(2), training=True)
    with pytest.raises(ValueError, match="one value per channel"):
        batch_norm(x[:1], None, None, training=True)
    with pytest.raises(ValueError, match="activation='swish'"):
        batch_norm(x, None, None, training=True, activation="swish")
    with pytest.raises(ValueError, match=r"x has shape \(4,\)"):
        batch_norm(x[:, 0], None, None, training=True)
    with pytest.raises(ValueError, match="dropout=-3 is not a probability"):
        batch_norm(x, torch.zeros(3), torch.ones(3), dropout=-3)
    with pytest.raises(TypeError, match="eps='a' is not a number"):
        batch_norm(x, None, None, training=True, eps="a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="momentum='a' is not a number"):
        batch_norm(x, None, None, training=True, momentum="a")  # type: ignore[arg-type]
    assert batch_norm(torch.empty(4, 0), None, None, training=True).shape == (4, 0)


@pytest.mark.parametrize(
    ("statistics", "options", "message"),
    [
        ((None, None), {"eps": -1.0}, "eps=-1.0 must be above 0"),
        ((torch.zeros(3), None), {}, "running_var=None beside the other one"),
        ((torch.zeros(3), torch.ones(3)), {"momentum": None}, "momentum=None: pass a number"),
    ],
)
def test_invalid_numbers_are_refused(statistics, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        batch_norm(torch.randn(4, 3), *statistics, training=True, **options)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_module_without_tracking_keeps_its_statistics(momentum: float | None) -> None:
    """As in PyTorch: neither the statistics nor the number of batches change."""
    ours, theirs = BatchNorm1d(5, momentum=momentum), nn.BatchNorm1d(5, momentum=momentum)
    x = torch.randn(7, 5)
    for norm in (ours, theirs):
        norm.track_running_stats = False
        norm(x)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


def test_the_mask_of_a_sliced_input_is_that_of_the_forward(device: torch.device) -> None:
    """The output has other strides than the input, and the bits are in the order of the output's memory."""
    for sliced in (lambda x: x[:, :8], lambda x: x[..., ::2]):
        whole = torch.randn(5, 14, 6, 7, device=device).to(memory_format=torch.channels_last)
        x = sliced(whole).requires_grad_()
        y = batch_norm(x, None, None, training=True, activation="sigmoid", dropout=0.4)
        exact = x.detach().double().requires_grad_()
        keep = y != 0
        expected = batch_norm_reference(exact, None, None, None, None, True, 1e-5, "sigmoid", keep, 0.4)
        dy = torch.randn_like(y)
        (dx,), (expected_dx,) = (
            torch.autograd.grad(y, x, dy),
            torch.autograd.grad(expected, exact, dy.double()),
        )
        rtol, atol = TOLERANCE[torch.float32]
        torch.testing.assert_close(dx.double(), expected_dx, rtol=5 * rtol, atol=5 * atol)
