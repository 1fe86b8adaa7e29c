from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onelaunch.activations import ACTIVATIONS, activate, saves_input
from tests.conftest import TOLERANCE
from tests.kernels.conftest import kernel_cases
from tests.kernels.reference import KEY, keep_mask, poisoned, unpacked

SHAPE = (37, 44, 50)  # m, n, k: no multiples of a tile's


# |z| at which the derivative jumps: there rounding may turn the side.
KINKS = {"relu": 0.0, "leaky_relu": 0.0, "selu": 0.0, "hardswish": 3.0}


def input_of(output: torch.Tensor, activation: str) -> torch.Tensor:
    """Where a rising activation has these values, by bisection; far to the left for its lowest ones."""
    low, high = torch.full_like(output, -64.0), torch.full_like(output, 64.0)
    for _ in range(80):
        middle = (low + high) / 2
        below = activate(middle, activation) < output
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low


@pytest.mark.parametrize(("kernel_device", "dtype", "activation", "p"), kernel_cases([None, *ACTIVATIONS], [0.0, 0.4]))
def test_both_implementations_and_the_backward_pass(
    kernel_device: torch.device, dtype: torch.dtype, activation: str | None, p: float
) -> None:
    from onelaunch.kernels.activation_dropout import activation_dropout_backward, activation_dropout_forward
    from onelaunch.kernels.linear import GemmTile, linear_forward

    m, n, k = SHAPE
    x = torch.randn(m, k, device=kernel_device, dtype=dtype)
    w = (torch.randn(n, k, device=kernel_device) / k**0.5).to(dtype)
    bias = torch.randn(n, device=kernel_device, dtype=dtype)
    y, z = poisoned(m, n, like=x), poisoned(m, n, like=x)
    bits = poisoned(m, -(-n // 8), like=x, dtype=torch.uint8) if p else None
    linear_forward(
        x, w, bias, y, z, bits, activation=activation, p=p, key=KEY, tile=GemmTile(16, 32, 16, 4, 2), tf32=False
    )
    expected_z = F.linear(x.cpu().double(), w.cpu().double(), bias.cpu().double()).requires_grad_()
    keep = keep_mask(m, n, p) if p else torch.ones(m, n, dtype=torch.bool)
    expected = torch.where(keep, activate(expected_z, activation) / (1 - p), 0)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(z.cpu().double(), expected_z, rtol=rtol, atol=atol)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=rtol, atol=atol)
    if bits is not None:
        kept = keep & (expected_z > 0) if activation == "relu" else keep
        clear = expected_z.abs() > 1e-2  # elsewhere rounding may change the sign
        assert torch.equal(unpacked(bits, n)[clear], kept[clear])

    product, again = x @ w.t(), poisoned(m, n, like=x)
    bits_again = None if bits is None else torch.zeros_like(bits)
    activation_dropout_forward(product, bias, again, bits_again, activation=activation, p=p, key=KEY, store_z=True)
    # The product is rounded too.
    torch.testing.assert_close(again.cpu().double(), expected, rtol=2 * rtol, atol=2 * atol)

    if activation is None and p == 0:
        return
    dy = torch.randn_like(y)
    expected.backward(dy.cpu().double())
    assert expected_z.grad is not None
    from_output = not saves_input(activation)
    saved = None if activation is None or (activation == "relu" and p) else y if from_output else z
    dz, dbias = poisoned(m, n, like=x), poisoned(n, like=x)
    activation_dropout_backward(
        dy, saved, bits, dz, dbias, activation=None if saved is None else activation, from_output=from_output, p=p
    )
    if activation in KINKS:
        exact = expected_z.grad
        if from_output:  # the kernel has the rounded output: the derivative is that at the input with this output
            at = input_of(y.cpu().double() * (1 - p), activation).requires_grad_()
            (exact,) = torch.autograd.grad(
                activate(at, activation), at, torch.where(keep, dy.cpu().double(), 0) / (1 - p)
            )
        wrong = (dz.cpu().double() - exact).abs() > atol + rtol * exact.abs()
        assert not (wrong & ((expected_z.abs() - KINKS[activation]).abs() > 1e-2)).any()
    else:
        torch.testing.assert_close(dz.cpu().double(), expected_z.grad, rtol=2 * rtol, atol=2 * atol)
    torch.testing.assert_close(dbias.cpu().double(), dz.cpu().double().sum(0), rtol=10 * rtol, atol=10 * atol)


@pytest.mark.parametrize(
    ("kernel_device", "dtype", "shape"),
    kernel_cases([(1, 1), (3, 300), (9, 2), (130, 20), (256, 24), (257, 24), (300, 70)]),
)
def test_backward_with_one_program_per_column_and_with_many(
    kernel_device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """A small batch takes tall tiles, whose sums are the bias gradient; a large one takes parts and a second kernel."""
    from onelaunch.kernels.activation_dropout import activation_dropout_backward, backward_tile

    m, n = shape
    dy = torch.randn(m, n, device=kernel_device, dtype=dtype)
    bits = torch.randint(256, (m, -(-n // 8)), device=kernel_device, dtype=torch.uint8)
    dz, dbias = poisoned(m, n, like=dy), poisoned(n, like=dy)
    activation_dropout_backward(dy, None, bits, dz, dbias, activation=None, from_output=False, p=0.25)
    expected = torch.where(unpacked(bits, n), dy.cpu().double() / 0.75, 0)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(dz.cpu().double(), expected, rtol=rtol, atol=atol)
    # The error of a sum in fp32 grows with the size of its terms, also where they cancel.
    allowed = atol + rtol * expected.sum(0).abs() + TOLERANCE[torch.float32][0] * expected.abs().sum(0)
    assert ((dbias.cpu().double() - expected.sum(0)).abs() <= allowed).all()
    rows, _, steps = backward_tile(m, n)
    assert (rows * steps >= m) == (m <= 256)


def test_no_bias_and_strided_rows(kernel_device: torch.device) -> None:
    from onelaunch.kernels.linear import GemmTile, linear_forward

    x = torch.randn(20, 64, device=kernel_device)[:, :40]
    w = torch.randn(24, 40, device=kernel_device)
    y = poisoned(20, 24, like=x)
    tile = GemmTile(16, 16, 32, 4, 2)
    linear_forward(x, w, None, y, None, None, activation="relu", p=0.0, key=KEY, tile=tile, tf32=False)
    torch.testing.assert_close(y, F.relu(F.linear(x, w)), rtol=1e-4, atol=1e-4)
