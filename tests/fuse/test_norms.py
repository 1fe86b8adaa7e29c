"""The patterns of layer norm and RMS norm: with dropout, with a residual, with a sum that is used elsewhere, written out."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from onelaunch.fuse.backend import onelaunch
from onelaunch.fuse.captured import own_code
from onelaunch.fuse.decide import PROVEN
from tests.conftest import TOLERANCE
from tests.fuse.rewritten import Of, Rewritten, assert_same_step, titles_of


class WrittenOut(nn.Module):
    """As `LlamaRMSNorm` of `transformers`, computed in `wide`."""

    def __init__(self, units: int, wide: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight, self.eps, self.wide = nn.Parameter(torch.randn(units)), 1e-6, wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(self.wide)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class Short(WrittenOut):
    """Without conversions, and with the factors the other way round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * x * self.weight


NORMS: dict[str, tuple[str, Any]] = {
    "layer_norm": ("layer_norm", lambda: nn.LayerNorm(6)),
    "without bias": ("layer_norm", lambda: nn.LayerNorm(6, bias=False)),
    "rms_norm": ("rms_norm", lambda: nn.RMSNorm(6)),
    "rms_norm with eps": ("rms_norm", lambda: nn.RMSNorm(6, eps=1e-3)),
    "written out": ("rms_norm", lambda: WrittenOut(6)),
    "short": ("rms_norm", lambda: Short(6)),
}


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def alone(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.norm(model.a(x))


def post_norm(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.b(model.norm(x + model.a(x).transpose(0, 1).contiguous().transpose(0, 1)))


def pre_norm(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.add(model.a(x), x)
    return x + model.b(model.norm(x)) * 2


def two_blocks(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The second sum adds to the first, whose node the first replacement has removed."""
    x = x + model.a(x)
    x = x + model.b(model.norm(x))
    return x + model.b(model.norm(x))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    ("forward", "chains"),
    [(alone, [""]), (post_norm, ["add + "]), (pre_norm, ["add + "]), (two_blocks, ["add + ", "add + "])],
)
def test_norms_after_additions(name: str, forward: Any, chains: list[str]) -> None:
    title, make = NORMS[name]
    model = Of(forward, a=linear(), b=linear(), norm=make())
    for aot in (False, True):
        rewritten = assert_same_step(model, torch.randn(3, 4, 6), [chain + title for chain in chains], aot=aot)
        model.zero_grad()
    for match in rewritten.matches:
        cost = match.pattern.cost(match)
        assert cost.launches == 3
        assert cost.bytes >= 5 * 12 * 6 * 8
        assert not match.pattern.pays(match)  # 12 rows of float64
        assert match.pattern.name not in PROVEN


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "written out"])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("sum_used", [True, False])
def test_dropout_before_the_norm(name: str, with_residual: bool, sum_used: bool) -> None:
    title, make = NORMS[name]
    norm = make().double()

    def forward(x: torch.Tensor, residual: torch.Tensor) -> Any:
        s = F.dropout(x.tanh(), 0.25)
        s = residual + s if with_residual else s
        return (norm(s), s * 2) if sum_used else (norm(s), None)

    x, residual = (torch.randn(40, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for aot in (False, True):
        torch._dynamo.reset()
        rewritten = Rewritten(forward, aot=aot)
        y, twice = rewritten(x, residual)
        assert rewritten.titles == [f"dropout + {'add + ' if with_residual else ''}{title}"]
        upstream = torch.randn_like(y)
        leaves = [x, *([residual] if with_residual else []), *norm.parameters()]
        loss = (y * upstream).sum() + (twice.sum() if twice is not None else 0)
        gradients = torch.autograd.grad(loss, leaves)
        kept = gradients[0] != 0
        assert 0.6 < kept.double().mean() < 0.9
        s = torch.where(kept, x.tanh() / 0.75, 0) + (residual if with_residual else 0)
        expected = norm(s)
        torch.testing.assert_close(y, expected)
        exact = (expected * upstream).sum() + (2 * s.sum() if sum_used else 0)
        for one, two in zip(gradients, torch.autograd.grad(exact, leaves), strict=True):
            torch.testing.assert_close(one, two)


def test_a_dropout_that_a_linear_layer_takes_is_left_to_it() -> None:
    model = Of(lambda m, x: m.norm(x + F.dropout(m.a(x), 0.5)), a=linear(), norm=nn.LayerNorm(6))
    assert titles_of(model, torch.randn(3, 6)) == ["linear + dropout", "add + layer_norm"]


def test_norms_that_are_left_alone() -> None:
    def grad(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(2, 4, 6, dtype=dtype, requires_grad=True)

    for norm in (
        nn.LayerNorm((4, 6)),
        nn.LayerNorm(6, elementwise_affine=False),
        nn.RMSNorm(6, elementwise_affine=False),
    ):
        assert titles_of(lambda x, norm=norm: norm(x * 2), grad()) == []
    affine, layer = nn.LayerNorm(6), linear()
    with torch.no_grad():
        assert titles_of(lambda x: affine(x), torch.randn(2, 6)) == []
    with torch.autocast("cpu", torch.bfloat16):
        assert titles_of(lambda x: affine(layer(x)), torch.randn(2, 6)) == []
    narrow = WrittenOut(6, torch.float32).double()  # it rounds what float64 would not
    assert titles_of(lambda x: narrow(x * 2), grad(torch.float64)) == []
    wide = WrittenOut(6, torch.float32)  # as in float32 models
    assert titles_of(lambda x: wide(x * 2), grad()) == ["rms_norm"]
    half = WrittenOut(6, torch.float32).bfloat16()
    assert titles_of(lambda x: half(x * 2), grad(torch.bfloat16)) == ["rms_norm"]


def other_axis(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6))


def cubed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 10))


def of_another(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def by_a_matrix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (weight + x) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def unweighted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return 2 * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) + weight


def mean_used(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(mean + 1e-6)) + mean


@pytest.mark.parametrize("function", [other_axis, cubed, of_another, by_a_matrix, unweighted, mean_used])
def test_what_only_looks_like_an_rms_norm(function: Any) -> None:
    x, weight = torch.randn(3, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    assert titles_of(function, x, weight) == []


def test_additions_that_are_left_alone() -> None:
    def used_between(model: Any, x: torch.Tensor) -> torch.Tensor:
        s = x + model.a(x)
        other = s.tanh()
        return model.norm(s) * other

    def broadcast(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.norm(x + model.a(x[:1]))

    def scaled(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.norm(torch.add(x, model.a(x), alpha=2))

    def in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        h += model.a(x)
        return model.norm(h)

    for forward in (used_between, broadcast, scaled, in_place):
        model = Of(forward, a=linear(), norm=nn.LayerNorm(6))
        assert_same_step(model, torch.randn(3, 6), ["layer_norm"])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # the compiler's own
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("autocast", [True, False])
def test_compiled_with_our_kernels(name: str, autocast: bool) -> None:
    """Inductor around the op, against the same step uncompiled; with autocast the residual stream is float32."""
    title, make = NORMS[name]
    norm = WrittenOut(6, torch.float32) if name == "written out" else make()
    model = Of(two_blocks, a=linear(), b=linear(), norm=norm).cuda()
    x, upstream = torch.randn(2, 2048, 6, device="cuda")
    results = []
    backend = functools.partial(onelaunch, patterns=(title,))
    for call in (torch.compile(own_code(model.forward), backend=backend), model.forward):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = call(x)
        (y * upstream).sum().backward()
        results.append([y.detach(), *(parameter.grad for parameter in model.parameters())])
    rtol, atol = TOLERANCE[torch.bfloat16 if autocast else torch.float32]
    for ours, theirs in zip(*results, strict=True):
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < 5 * max(rtol, atol), error


STEPS = ("linear", "layer_norm", "rms_norm", "written out", "short", "residual", "use sum", "view", "scale", "inplace")


class Chain(nn.Module):
    """Operations in the order that `steps` names; residuals add the value of some steps before."""

    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.parts = nn.ModuleList(
            NORMS[step][1]() if step in NORMS else linear() if step == "linear" else nn.Identity() for step, _ in steps
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, total = [x * 1], x.sum()
        for part, (step, back) in zip(self.parts, self.steps, strict=True):
            value, earlier = values[-1], values[-1 - back % len(values)]
            if step == "residual":
                value = value + earlier
            elif step == "use sum":
                total = total + (value * earlier).sum()
            elif step == "view":
                value = value.reshape(-1).view(-1, 6)
            elif step == "scale":
                value = value * 1.5
            elif step == "inplace":
                value = value * 1
                value += earlier
            else:
                value = part(value)
            values.append(value)
        return values[-1] + total


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 4)), min_size=1, max_size=8))
def test_random_graphs_compute_the_same(steps: list[tuple[str, int]]) -> None:
    torch.manual_seed(len(steps))
    assert_same_step(Chain(steps), torch.randn(4, 6))
