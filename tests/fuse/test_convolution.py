"""The pattern convolution → batch norm → + residual → relu: what it takes and leaves, and float64 parity on random graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from onelaunch.fuse.patterns import BY_NAME, find_matches
from tests.conftest import TOLERANCE
from tests.fuse.models import ResNet, UNet
from tests.fuse.rewritten import Rewritten

NAMES = ("convolution",)


def with_statistics(model: nn.Module) -> nn.Module:
    """In evaluation and float64, with running statistics that are not those of a new model."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.double().eval()


def in_layout(model: nn.Module, layout: torch.memory_format) -> nn.Module:
    return model.to(memory_format=layout)  # type: ignore[call-overload,no-any-return]


def assert_same(
    model: nn.Module, *inputs: torch.Tensor, titles: list[str] | None = None, aot: bool = False
) -> Rewritten:
    rtol, atol = TOLERANCE[torch.float64]
    rewritten = Rewritten(with_statistics(model), NAMES, aot)
    with torch.no_grad():
        ours, theirs = [x.double() for x in inputs], [x.double() for x in inputs]
        got, expected = rewritten(*ours), copy.deepcopy(model)(*theirs)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=10 * atol)
    assert got.stride() == expected.stride()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two)
    if titles is not None:
        assert rewritten.titles == titles
    return rewritten


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("aot", [False, True])
def test_residual_network(layout: torch.memory_format, aot: bool) -> None:
    model = in_layout(ResNet(), layout)
    rewritten = assert_same(model, torch.randn(2, 3, 16, 16).to(memory_format=layout), aot=aot)
    assert sorted(rewritten.titles) == ["conv2d + batch_norm + add + relu"] * 4 + ["conv2d + batch_norm + relu"] * 5


def test_other_models() -> None:
    assert len(assert_same(UNet(), torch.randn(2, 3, 8, 8)).titles) == 6
    one = nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1, 1, 2, padding_mode="circular"), nn.BatchNorm2d(4), nn.ReLU())
    assert_same(one, torch.randn(2, 4, 5, 5), titles=["conv2d + batch_norm + relu"])


class Block(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv, self.norm, self.function = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def overwritten_residual(m: Any, x: torch.Tensor) -> torch.Tensor:
    other = x * 2
    added = m.norm(m.conv(x)) + other
    other.zero_()
    return F.relu(added) + other


def overwritten_input(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    made = m.norm(m.conv(x))
    x.zero_()
    return F.relu(made) + x


def written_residual(m: Any, x: torch.Tensor) -> torch.Tensor:
    other = x * 2
    other += m.norm(m.conv(x))
    return F.relu(other) + other


def changed_statistics(m: Any, x: torch.Tensor) -> torch.Tensor:
    made = m.norm(m.conv(x))
    m.norm.running_mean.add_(1)
    result = F.relu(made)
    m.norm.running_mean.sub_(1)
    return result


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.relu((h := m.conv(x)) * 1 + m.norm(h)),  # the convolution's value is used twice
        lambda m, x: F.relu((h := m.norm(m.conv(x))) + h),
        lambda m, x: F.relu(m.norm(m.conv(x)) + x[:, :1]),  # broadcast
        lambda m, x: F.relu(m.norm(m.conv(x)) + 1),
        lambda m, x: F.relu(torch.add(m.norm(m.conv(x)), x, alpha=2)),
        lambda m, x: torch.tanh(m.norm(m.conv(x))),
        lambda m, x: F.relu(F.batch_norm(m.conv(x), None, None, training=True)),
        lambda m, x: F.relu(m.norm(F.conv2d(x, m.conv.weight, padding="same"))),
        overwritten_residual,
        overwritten_input,
        written_residual,
        changed_statistics,
    ],
)
def test_what_is_left(function: Any) -> None:
    assert_same(Block(function), torch.randn(2, 4, 5, 5), titles=[])


def test_not_with_gradients() -> None:
    """The op has no backward pass."""
    model = with_statistics(Block(lambda m, x: F.relu(m.norm(m.conv(x)))))
    rewritten, x = Rewritten(model, NAMES), torch.randn(2, 4, 5, 5).double()
    assert rewritten(x).requires_grad
    assert rewritten.titles == []
    with torch.no_grad():
        torch.testing.assert_close(rewritten(x), model(x))
    assert rewritten.titles == ["conv2d + batch_norm + relu"]
    assert rewritten(x.requires_grad_()).requires_grad
    rewritten = Rewritten(with_statistics(model).requires_grad_(False), NAMES)  # frozen
    torch.testing.assert_close(rewritten(x.detach()), model(x.detach()))
    assert rewritten.titles == ["conv2d + batch_norm + relu"]


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_not_where_gradients_are_cut_in_place(inplace: bool, frozen: bool) -> None:
    model = with_statistics(Block(lambda m, x: F.relu(m.norm(m.conv(x)), inplace).detach_()))
    model.conv.requires_grad_(not frozen)  # type: ignore[union-attr]
    rewritten, x = Rewritten(model, NAMES, aot=True), torch.randn(2, 4, 5, 5).double()
    torch.testing.assert_close(rewritten(x), model(x))
    assert rewritten.titles == []


def test_under_autocast() -> None:
    model, x = Block(lambda m, x: F.relu(m.norm(m.conv(x)) + m.conv(x))).eval(), torch.randn(2, 4, 5, 5)
    rewritten = Rewritten(model, NAMES)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, expected = rewritten(x), model(x)
    assert rewritten.titles == ["conv2d + batch_norm + add + relu"]
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("channels", "groups", "layout", "dtype", "pays"),
    [
        (8, 1, torch.channels_last, torch.float32, True),
        (8, 1, torch.contiguous_format, torch.float32, False),
        (8, 2, torch.channels_last, torch.float32, False),
        (12, 1, torch.channels_last, torch.float32, False),
        (8, 1, torch.channels_last, torch.float64, False),
    ],
)
def test_where_it_may_pay(
    channels: int, groups: int, layout: torch.memory_format, dtype: torch.dtype, pays: bool
) -> None:
    conv = nn.Conv2d(channels, channels, 3, groups=groups)
    model = in_layout(nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU()).to(dtype), layout).eval()
    rewritten = Rewritten(model, ())
    with torch.no_grad():
        rewritten(torch.randn(2, channels, 6, 6, dtype=dtype).to(memory_format=layout))
    (match,) = [one for one in find_matches(rewritten.graphs[0].graph) if one.pattern is BY_NAME["convolution"]]
    assert match.pattern.pays(match) is pays
    cost = match.pattern.cost(match)
    assert cost.launches == 3
    assert cost.flops == 2 * 2 * 16 * channels * channels // groups * 9


STEPS = ("conv", "norm", "relu", "inplace", "residual", "reversed", "iadd", "scale", "twice")


class Chain(nn.Module):
    """Operations over images in the order that `steps` names."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps
        makers = {"conv": lambda: nn.Conv2d(4, 4, 3, padding=1), "norm": lambda: nn.BatchNorm2d(4)}
        self.parts = nn.ModuleList(makers.get(step, nn.Identity)() for step in steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        saved, value = x, x * 1
        for part, step in zip(self.parts, self.steps, strict=True):
            if step in ("conv", "norm"):
                value = part(value)
            elif step in ("relu", "inplace"):
                value = F.relu(value, inplace=step == "inplace")
            elif step == "residual":
                value, saved = value + saved, value
            elif step == "reversed":
                value, saved = saved + value, value
            elif step == "iadd":
                value += saved
            elif step == "scale":
                saved = value.mul(0.5)
            else:
                value = value + F.relu(value)
        return value


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from((*STEPS, "block", "bottleneck")), min_size=1, max_size=6))
def test_random_graphs_compute_the_same(names: list[str]) -> None:
    torch.manual_seed(len(names))
    blocks = {"block": ["conv", "norm", "relu"], "bottleneck": ["conv", "norm", "residual", "relu"]}
    steps = [step for name in names for step in blocks.get(name, [name])]
    assert_same(Chain(steps), torch.randn(2, 4, 5, 5))
