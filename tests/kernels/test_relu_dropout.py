from __future__ import annotations

import pytest
import torch

from tests.conftest import TOLERANCE
from tests.kernels.conftest import kernel_cases
from tests.kernels.reference import KEY, keep_mask, poisoned, unpacked


@pytest.mark.parametrize(("kernel_device", "dtype", "n", "p"), kernel_cases([1, 8, 1031], [0.0, 0.3, 1.0]))
def test_values_bits_and_gradient(kernel_device: torch.device, dtype: torch.dtype, n: int, p: float) -> None:
    from onelaunch.kernels.relu_dropout import relu_dropout_backward, relu_dropout_forward

    x = torch.randn(n, device=kernel_device, dtype=dtype)
    y, bits = poisoned(n, like=x), poisoned(-(-n // 8), like=x, dtype=torch.uint8)
    relu_dropout_forward(x, y, bits, p, KEY)
    keep = keep_mask(1, n, p)[0]
    scale = 0.0 if p == 1 else 1 / (1 - p)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(
        y.cpu().double(), torch.where(keep, x.cpu().double().relu() * scale, 0), rtol=rtol, atol=atol
    )
    assert torch.equal(unpacked(bits, n), keep & (x.cpu() > 0))

    dy, dx = torch.randn_like(x), poisoned(n, like=x)
    relu_dropout_backward(dy, bits, dx, p)
    expected = torch.where(keep & (x.cpu() > 0), dy.cpu().double() * scale, 0)
    torch.testing.assert_close(dx.cpu().double(), expected, rtol=rtol, atol=atol)


def test_mask_does_not_depend_on_the_tile_or_the_place_of_the_key(kernel_device: torch.device) -> None:
    from onelaunch.kernels.dropout_key import DropoutKey
    from onelaunch.kernels.relu_dropout import relu_dropout_forward

    x = torch.ones(5000, device=kernel_device)
    in_memory = DropoutKey(torch.tensor([KEY.seed, KEY.offset], device=kernel_device), 0, 0)
    masks = []
    for tile, key in (((64, 1), KEY), ((256, 4), KEY), ((128, 2), in_memory)):
        y, bits = poisoned(5000, like=x), poisoned(625, like=x, dtype=torch.uint8)
        relu_dropout_forward(x, y, bits, 0.5, key, tile)
        masks.append(bits)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    relu_dropout_forward(x, y, None, 0.5, KEY)  # no bits without a backward pass
    assert torch.equal(y.cpu() != 0, unpacked(masks[0], 5000))


def test_nan_passes_through_with_its_gradient(kernel_device: torch.device) -> None:
    from onelaunch.kernels.relu_dropout import relu_dropout_backward, relu_dropout_forward

    x = torch.full((64,), float("nan"), device=kernel_device)
    y, bits = torch.zeros_like(x), poisoned(8, like=x, dtype=torch.uint8)
    relu_dropout_forward(x, y, bits, 0.0, KEY)
    assert y.isnan().all()
    dx = poisoned(64, like=x)
    relu_dropout_backward(torch.ones_like(x), bits, dx, 0.0)
    assert torch.equal(dx, torch.ones_like(x))
