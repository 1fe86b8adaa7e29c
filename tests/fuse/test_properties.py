"""Random module trees with branches, sharing, hooks and changes in place: fused and original must agree in everything."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import onelaunch as ol
from tests.fuse.compare import assert_same

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")

WIDTH = 6
STEPS = (
    "linear", "linear_function", "norm", "relu", "relu_in_place", "relu_function", "relu_method", "gelu", "tanh_in_place",
    "silu", "leaky", "steep_leaky", "sigmoid", "dropout", "dropout_function", "dropout_in_place", "residual", "second_reader",
    "add_in_place", "augmented_add", "view_add_in_place", "reuse_linear", "reuse_relu", "subclass", "nested", "detached",
)  # fmt: skip


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Program(nn.Module):
    """Runs a list of steps; each makes or reuses modules, and some read earlier values again."""

    def __init__(self, steps: list[str], hooked: set[int], shared: nn.Linear, depth: int = 0) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.shared, self.relu = shared, nn.ReLU()
        self.layers = nn.ModuleList(self._module(step, index, shared, depth) for index, step in enumerate(steps))
        self.calls: tuple[str, ...] = ()
        for index in hooked:
            if index < len(steps):
                self.layers[index].register_forward_hook(lambda module, args, out: out * 1.5)

    def _module(self, step: str, index: int, shared: nn.Linear, depth: int) -> nn.Module:
        match step:
            case "linear" | "linear_function":
                return nn.Linear(WIDTH, WIDTH, bias=index % 2 == 0)
            case "subclass":
                return Doubled(WIDTH, WIDTH)
            case "norm":
                return nn.BatchNorm1d(WIDTH)
            case "relu_in_place":
                return nn.ReLU(inplace=True)
            case "gelu":
                return nn.GELU("tanh" if index % 2 else "none")
            case "leaky" | "steep_leaky":
                return nn.LeakyReLU(0.01 if step == "leaky" else 0.3)
            case "silu":
                return nn.SiLU(inplace=index % 3 == 0)
            case "dropout" | "dropout_in_place":
                return nn.Dropout(0.0, inplace=step.endswith("place"))
            case "nested" if depth < 2:
                inner = [s for s in self.steps[index + 1 : index + 4] if s != "nested"]
                first = Program(inner, set(), shared, depth + 1)
                return nn.Sequential(first, nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.ReLU())
        return nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        earlier = x
        for index, step in enumerate(self.steps):
            before = x
            match step:
                case "linear_function":
                    x = F.linear(x, self.layers[index].weight, self.layers[index].bias)
                case "relu_function":
                    x = F.relu(x)
                case "relu_method":
                    x = x.relu()
                case "tanh_in_place":
                    x = (x * 1).tanh_()
                case "sigmoid":
                    x = torch.sigmoid(x)
                case "dropout_function":
                    x = F.dropout(x, 0.0, training=self.training)
                case "residual":
                    x = x + earlier
                case "second_reader":
                    x = F.relu(x) + x
                case "add_in_place":
                    x = (x * 1).add_(0.5)
                case "augmented_add":
                    x = x * 1
                    x += earlier
                case "view_add_in_place":
                    x = x * 1
                    x.view(-1)[:3].mul_(0.5)
                case "reuse_linear":
                    x = F.relu(self.shared(x))
                case "reuse_relu":
                    x = self.relu(x)
                case "detached":
                    x = x + x.detach()
                case _:
                    x = self.layers[index](x)
            if index % 3 == 0:
                earlier = before
        return x


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=12),
    hooked=st.sets(st.integers(0, 11), max_size=2),
    train_only=st.sets(st.integers(0, 11), max_size=2),
    seed=st.integers(0, 10**6),
)
def test_fused_is_the_original(steps: list[str], hooked: set[int], train_only: set[int], seed: int) -> None:
    torch.manual_seed(seed)
    shared = nn.Linear(WIDTH, WIDTH)
    model = Program(steps, hooked, shared).double()
    fused = ol.fuse(model)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    if not can_go_back(model, x):
        return
    assert_same(model, fused, x)
    for index in train_only:  # modes that differ inside one model
        for tree in (model, fused):
            if index < len(steps):
                tree.layers[index].train(not tree.layers[index].training)  # type: ignore[union-attr, operator]
    assert_one_call(model, fused, x)
    assert_one_call(model, copy.deepcopy(fused), x)


def can_go_back(model: nn.Module, x: torch.Tensor) -> bool:
    """Not so where a value that the backward needs is changed in place: such a program is wrong by itself."""
    try:
        model(x.clone().requires_grad_() * 1).sum().backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return False
    model.zero_grad()
    return True


def assert_one_call(model: nn.Module, fused: nn.Module, x: torch.Tensor) -> None:
    buffers = [buffer.clone() for buffer in model.buffers()]
    expected = model(x.clone())
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    torch.testing.assert_close(fused(x.clone()), expected, rtol=1e-12, atol=1e-12)


def test_the_programs_do_fuse() -> None:
    """The property above would hold of a fuse that does nothing."""
    from onelaunch.fuse.placing import regions

    model = Program(["linear", "gelu", "norm", "relu", "dropout", "nested", "linear"], set(), nn.Linear(WIDTH, WIDTH))
    names = [chain.name for region in regions(ol.fuse(model)) for plan in region.plans for chain in plan.fused]
    assert {"linear + gelu_tanh", "batch_norm + relu + dropout", "linear + relu"} <= set(names)
