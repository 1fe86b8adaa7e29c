"""Convolution with a folded batch norm, residual and ReLU, against PyTorch's functions in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onelaunch.ops.conv_batch_norm_relu import conv_add_relu_op, conv_batch_norm_relu
from tests.conftest import TOLERANCE
from tests.ops.conftest import DTYPES
from tests.pairwise import cases


def arguments(
    device: torch.device,
    dtype: torch.dtype,
    layout: torch.memory_format,
    size: int = 3,
    bias: bool = True,
    groups: int = 1,
) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, weight = random(2, 8, 9, 7).to(memory_format=layout), random(16, 8 // groups, size, size) / 8
    return {
        "x": x, "weight": weight.to(memory_format=layout), "bias": random(16) if bias else None,
        "running_mean": random(16), "running_var": random(16).abs() + 0.5, "bn_weight": random(16), "bn_bias": random(16),
        "groups": groups,
    }  # fmt: skip


def expected_result(given: dict[str, Any]) -> torch.Tensor:
    wide = {name: one.double() if isinstance(one, torch.Tensor) else one for name, one in given.items()}
    sizes = (wide.get("stride", 1), wide.get("padding", 0), wide.get("dilation", 1), wide.get("groups", 1))
    y = F.conv2d(wide["x"], wide["weight"], wide["bias"], *sizes)
    norm = (wide["running_mean"], wide["running_var"], wide.get("bn_weight"), wide.get("bn_bias"))
    y = F.batch_norm(y, *norm, eps=wide.get("eps", 1e-5))
    return F.relu(y if wide.get("residual") is None else y + wide["residual"])


@pytest.mark.parametrize(
    ("dtype", "layout", "size", "bias", "residual", "stride", "padding", "dilation", "groups"),
    cases(
        [torch.float64, *DTYPES], [torch.contiguous_format, torch.channels_last], [1, 3], [True, False], [True, False],
        [1, (2, 1)], [0, (1, 2)], [1, 2], [1, 2],
    ),
)  # fmt: skip
def test_values(
    device: torch.device, dtype: torch.dtype, layout: torch.memory_format, size: int, bias: bool, residual: bool,
    stride: Any, padding: Any, dilation: int, groups: int,
) -> None:  # fmt: skip
    given = arguments(device, dtype, layout, size, bias, groups)
    given |= {"stride": stride, "padding": padding, "dilation": dilation, "eps": 1e-3}
    if residual:
        given["residual"] = torch.randn_like(expected_result(given)).to(dtype)
    got, expected = conv_batch_norm_relu(**given), expected_result(given)
    assert got.dtype == dtype
    assert got.is_contiguous(memory_format=layout)
    rtol, atol = TOLERANCE[dtype]
    # The folded weight is rounded once more: a sum of 72 products errs by several roundings of its terms.
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=atol * 10)


def test_without_weights_of_the_batch_norm(device: torch.device) -> None:
    given = arguments(device, torch.float32, torch.contiguous_format)
    given |= {"bn_weight": None, "bn_bias": None}
    torch.testing.assert_close(conv_batch_norm_relu(**given), expected_result(given).float())


def test_other_types_are_converted(device: torch.device) -> None:
    given = arguments(device, torch.float32, torch.channels_last)
    got = conv_batch_norm_relu(**given, dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16
    rtol, atol = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(got.double(), expected_result(given), rtol=rtol, atol=atol * 10)


def test_an_empty_batch(device: torch.device) -> None:
    given = arguments(device, torch.float32, torch.contiguous_format)
    given["x"] = given["x"][:0]
    assert conv_batch_norm_relu(**given).shape == (0, 16, 7, 5)


@pytest.mark.parametrize(("layout", "residual"), cases([torch.contiguous_format, torch.channels_last], [True, False]))
def test_opcheck(device: torch.device, layout: torch.memory_format, residual: bool) -> None:
    x = torch.randn(2, 8, 5, 5, device=device).to(memory_format=layout)
    weight, bias = torch.randn(8, 8, 3, 3, device=device).to(memory_format=layout), torch.randn(8, device=device)
    torch.library.opcheck(conv_add_relu_op, (x, weight, bias, x if residual else None, [1, 1], [1, 1], [1, 1], 1))


def test_in_a_compiled_function_and_a_transform(device: torch.device) -> None:
    given = arguments(device, torch.float32, torch.channels_last)
    x = given.pop("x")
    compiled = torch.compile(
        lambda x: conv_batch_norm_relu(x * 2, **given), backend="aot_eager", fullgraph=True, dynamic=False
    )
    with torch.backends.cudnn.flags(allow_tf32=False):
        torch.testing.assert_close(compiled(x), expected_result({"x": 2 * x, **given}).float())
        batched = torch.func.vmap(lambda x: conv_batch_norm_relu(x, **given))(torch.stack([x, x + 1]))
    torch.testing.assert_close(batched[1], expected_result({"x": x + 1, **given}).float())


def test_errors_in_one_line() -> None:
    given = arguments(torch.device("cpu"), torch.float32, torch.contiguous_format)
    with pytest.raises(ValueError, match=r"^conv_batch_norm_relu has no backward pass: call it inside torch\.no_grad"):
        conv_batch_norm_relu(**given | {"weight": given["weight"].requires_grad_()})
    with torch.no_grad():
        assert not conv_batch_norm_relu(**given).requires_grad
        with pytest.raises(ValueError, match=r"^x has shape \(8, 9, 7\) and weight .*: pass four dimensions each"):
            conv_batch_norm_relu(**given | {"x": given["x"][0]})
        with pytest.raises(ValueError, match=r"^residual has shape \(1,\) and the result \(2, 16, 7, 5\): pass equal"):
            conv_batch_norm_relu(**given, residual=torch.ones(1))
        with pytest.raises(TypeError, match=r"^weight is a int: pass a torch\.Tensor"):
            conv_batch_norm_relu(**given | {"weight": 3})
