from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onelaunch.activations import ACTIVATIONS, activate
from onelaunch.integers import ceil_div
from tests.conftest import TOLERANCE
from tests.kernels.conftest import kernel_cases
from tests.kernels.reference import KEY, keep_mask, poisoned, unpacked
from tests.pairwise import cases

CASES = [  # shape, activation, p, training
    ((37, 44), None, 0.0, True),
    ((37, 44), "relu", 0.4, True),
    ((140, 20), "gelu", 0.4, True),
    ((256, 64), "relu", 0.4, True),  # whole tiles
    ((64, 2, 64), "relu", 0.4, True),
    ((37, 44), "relu", 0.0, False),
    ((5, 6, 30), "relu", 0.4, True),
    ((5, 6, 30), "silu", 0.0, True),
    ((4, 3, 8, 9), "relu", 0.4, False),
]


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs per launch keep the interpreter quick, and more than one tests the merge."""
    from onelaunch.kernels import batch_norm, batch_norm_backward

    for module, name in ((batch_norm, "STATISTICS_TILE"), (batch_norm_backward, "SUMS_TILE")):
        few = {size: shape._replace(warps=2, programs=5) for size, shape in getattr(module, name).items()}
        monkeypatch.setattr(module, name, few)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("kernel_device", "dtype", "case"), kernel_cases(CASES))
def test_against_float64(
    kernel_device: torch.device, dtype: torch.dtype, case: tuple[tuple[int, ...], str | None, float, bool]
) -> None:
    check_against_float64(kernel_device, dtype, *case)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("activation", "p"), cases(list(ACTIVATIONS), [0.0, 0.4]))
def test_every_activation(kernel_device: torch.device, activation: str, p: float) -> None:
    check_against_float64(kernel_device, torch.float32, (9, 12), activation, p, True)


def check_against_float64(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], activation: str | None, p: float, training: bool
) -> None:
    """Compare forward and backward kernels with PyTorch's batch norm in float64 and the reference mask."""
    from onelaunch.kernels import batch_norm, batch_norm_backward
    from onelaunch.kernels.batch_norm_tiles import Layout

    channels = shape[1]
    length = 0 if len(shape) == 2 else torch.Size(shape[2:]).numel()
    layout = Layout(shape[0], channels, length)
    x = (torch.randn(shape, device=device) * 3 + 5).to(dtype)
    weight, bias = torch.randn(channels, device=device), torch.randn(channels, device=device)
    running_mean, running_var = torch.randn_like(weight), torch.rand_like(weight) + 0.5

    exact = [t.cpu().double() for t in (x, weight, bias)]
    for tensor in exact:
        tensor.requires_grad_()
    mean64, var64 = running_mean.cpu().double(), running_var.cpu().double()
    z = F.batch_norm(exact[0], mean64, var64, exact[1], exact[2], training, 0.1, 1e-5)
    keep = keep_mask(layout.lines, layout.inner, p) if p else torch.ones(layout.lines, layout.inner, dtype=torch.bool)
    expected = torch.where(keep.view(shape), activate(z, activation) / (1 - p), 0)
    dy = torch.randn_like(x)
    expected.backward(dy.cpu().double())

    statistics = poisoned(3, channels, like=weight)
    if training:
        batch_norm.batch_statistics(x, layout, statistics, running_mean, running_var, momentum=0.1, eps=1e-5)
        torch.testing.assert_close(running_mean.cpu().double(), mean64, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(running_var.cpu().double(), var64, rtol=1e-5, atol=1e-5)
    else:
        statistics = torch.stack((running_mean, (running_var + 1e-5).rsqrt()))
    y, dx, sums = poisoned(*shape, like=x), poisoned(*shape, like=x), poisoned(2, channels, like=weight)
    bits = poisoned(layout.lines, ceil_div(layout.inner, 8), like=x, dtype=torch.uint8) if p else None
    batch_norm.normalise(x, layout, statistics, weight, bias, y, bits, activation=activation, p=p, key=KEY)
    batch_norm_backward.batch_norm_backward(
        dy, x, layout, bits, statistics, weight, bias, dx, sums, training=training, activation=activation, p=p
    )
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(y.cpu().double(), expected, rtol=rtol, atol=5 * atol)
    torch.testing.assert_close(dx.cpu().double(), exact[0].grad, rtol=rtol, atol=5 * atol)
    for got, tensor in ((sums[1], exact[1]), (sums[0], exact[2])):
        assert tensor.grad is not None
        assert (got.cpu().double() - tensor.grad).norm() <= 1e-5 * tensor.grad.norm()  # both may be 0


@pytest.mark.parametrize(("kernel_device", "dtype", "p"), kernel_cases([0.4, 1e-6, 0.999999]))
def test_relu_and_dropout_at_the_edges(kernel_device: torch.device, dtype: torch.dtype, p: float) -> None:
    """Zeros of either sign have derivative 0, a NaN passes through with its gradient; p may round to 0 or 1."""
    from onelaunch.kernels.batch_norm import normalise
    from onelaunch.kernels.batch_norm_tiles import Layout

    values = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 2.0**-20])
    shape, channels = (64, 24), 24
    z = values.repeat(3).to(dtype).to(kernel_device)
    x = z.expand(shape).contiguous()
    statistics = torch.stack((torch.zeros(channels), torch.ones(channels))).to(kernel_device)
    y, bits = poisoned(*shape, like=x), poisoned(64, 3, like=x, dtype=torch.uint8)
    no_bias = torch.full((channels,), -0.0, device=kernel_device)  # adding it changes no sign
    tiny = torch.full((channels,), 2.0**-10, device=kernel_device)
    # The smallest number of fp16, or the smallest normal one; times `tiny` it rounds to -0 in 16 bits.
    least = torch.full_like(x, -(2.0 ** (-24 if dtype == torch.float16 else -126)))
    normalise(least, Layout(64, 24, 0), statistics, tiny, no_bias, y, bits, activation="relu", p=p, key=KEY)
    assert not bits.any()
    assert not y.any()
    normalise(x, Layout(64, 24, 0), statistics, None, no_bias, y, bits, activation="relu", p=p, key=KEY)
    kept = keep_mask(64, 24, p)
    passes = kept & ~(x.cpu() <= 0)
    assert torch.equal(unpacked(bits, 24), passes)
    expected = torch.where(passes, x.cpu().double() / (1 - p), 0)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(y.cpu().double(), expected, rtol=rtol, atol=atol, equal_nan=True)
    assert not y.cpu()[~passes].any()


def test_statistics_survive_a_mean_far_from_zero(kernel_device: torch.device) -> None:
    from onelaunch.kernels.batch_norm import batch_statistics
    from onelaunch.kernels.batch_norm_tiles import Layout

    x = torch.randn(4096, 8, device=kernel_device) + 3000
    statistics = poisoned(3, 8, like=x)
    batch_statistics(x, Layout(4096, 8, 0), statistics, None, None, momentum=0.1, eps=0.0)
    var, mean = torch.var_mean(x.cpu().double(), 0, correction=0)
    torch.testing.assert_close(statistics[0].cpu().double(), mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(statistics[1].cpu().double(), var.rsqrt(), rtol=1e-4, atol=0)
    torch.testing.assert_close(statistics[2].cpu().double(), var * (4096 / 4095), rtol=2e-4, atol=0)
