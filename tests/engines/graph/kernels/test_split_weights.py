"""Weights split into two 16-bit words: nothing is lost, and a step on them is the step on the weights themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onelaunch as ol
from onelaunch.engines.graph.plan import plan
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.engines.graph.harness import DEVICE, Silent, assert_follows_eager, data, network, session, train
from tests.reference import assert_same_weights

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = [8, 24, 16, 4]
# Zeros, the smallest and largest of each kind, values that round to infinity, infinities, NaN of all kinds, ties.
PATTERNS = [
    0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x7FFFFF, 0x800000, 0x3F7F8000, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000,
    0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF,
]  # fmt: skip


def check_words(bits: torch.Tensor) -> None:
    from onelaunch.engines.graph.kernels.split_weights import join_weights, split_weights

    weight = bits.to(torch.int32).view(torch.float32).to(DEVICE)
    high, low = torch.empty_like(weight, dtype=torch.bfloat16), torch.empty_like(weight, dtype=torch.int16)
    split_weights(weight, high, low)
    back = torch.full_like(weight, 7.0)
    join_weights(back, high, low)
    number = ~weight.isnan()
    assert torch.equal(back.view(torch.int32)[number], weight.view(torch.int32)[number])
    assert back.isnan().equal(~number)
    assert high.isnan().equal(~number)
    # The nearest bf16: PyTorch's rounding, except for ties, which PyTorch rounds to the even neighbour.
    tie = weight.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(high[number & ~tie], weight[number & ~tie].bfloat16())
    up = ((weight.view(torch.int32) >> 16) + 1).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(high[number & tie], up[number & tie])


def test_special_values():
    bits = torch.tensor(PATTERNS)
    check_words(torch.cat([bits, bits - 2**31]))


@settings(max_examples=30)
@given(st.integers(0, 2**63 - 1))
def test_any_bit_pattern(seed):
    generator = torch.Generator().manual_seed(seed)
    check_words(torch.randint(-(2**31), 2**31, (5000,), generator=generator))


@pytest.fixture
def use_split_weights(monkeypatch):
    """Splits weights in fp32 runs too, since Triton's interpreter cannot compute products in bf16. They read `high` as fp32."""
    forced = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(plan.Planner, "split_weights", forced, raising=False)


class Rounded(torch.nn.Linear):
    """Products with the weights rounded as `high` is, gradients for the weights themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bits = self.weight.detach().view(torch.int32) + 0x8000
        rounded = (bits & ~0xFFFF).view(torch.float32)
        return torch.nn.functional.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


def test_a_step_from_rounded_weights_gives_the_same_bits(request):
    """Where the weights are bf16 numbers there is nothing to round, so the low words must be complete."""
    torch.manual_seed(0)
    options = {"steps": 1, "batch_size": 10, "lr": 0.1, "weight_decay": 1e-3}
    x, y = data(WIDTHS, "cross_entropy", 17)
    model = network(WIDTHS, "gelu", 0.2).bfloat16().float()
    twin = copy.deepcopy(model)
    expected, _ = train(twin, x, y, options)
    request.getfixturevalue("use_split_weights")
    assert torch.equal(train(model, x, y, options)[0], expected)
    assert_same_weights(model, twin, 0.0)
    assert not torch.equal(model[1].weight, model[1].weight.bfloat16().float())


@pytest.mark.parametrize(("widths", "validation"), [(WIDTHS, True), ([8, 24, 264, 3], False)])
def test_products_read_the_high_word(widths, validation, use_split_weights):
    torch.manual_seed(0)
    options = {"steps": 2, "batch_size": 10, "lr": 0.1}
    x, y = data(widths, "cross_entropy", 17)
    model = network(widths, "relu")
    twin = copy.deepcopy(model)
    for layer in twin:
        if isinstance(layer, torch.nn.Linear):
            layer.__class__ = Rounded
    assert_follows_eager(
        model, x, y, options, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE, validation=validation, twin=twin
    )  # fmt: skip


def test_a_run_continues_from_its_snapshot_with_the_same_bits(use_split_weights):
    options = {"steps": 3, "batch_size": 8, "lr": 0.05}
    x, y = data(WIDTHS, "cross_entropy", rows=24)
    model = network(WIDTHS, "relu", 0.2)
    twin = copy.deepcopy(model)
    expected, _ = train(twin, x, y, options)
    part = session(model, x, y, options)
    first = next(part.segments(0, Silent(reports=1)))
    state = part.snapshot()
    saved = copy.deepcopy(model)  # what a checkpoint would hold
    part.close()
    rest = session(saved, x, y, options, state=state)
    got = torch.cat([first.losses, *(segment.losses for segment in rest.segments(len(first.losses), Silent()))])
    rest.close()
    assert torch.equal(got, expected)
    assert_same_weights(saved, twin, 0.0)


def test_parameters_may_have_any_address():
    options = {"steps": 1, "batch_size": 8, "lr": 0.05}
    x, y = data(WIDTHS, "cross_entropy", rows=8)
    model = network(WIDTHS, "relu")
    twin = copy.deepcopy(model)
    for layer in (model[1], model[3]):
        shifted = torch.empty(layer.weight.numel() + 1, device=DEVICE)[1:].view_as(layer.weight)
        layer.weight = torch.nn.Parameter(shifted.copy_(layer.weight.detach()))
        assert layer.weight.data_ptr() % 16
    assert torch.equal(train(model, x, y, options)[0], train(twin, x, y, options)[0])
    assert_same_weights(model, twin, 0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3.4e38])
def test_weights_past_bf16_give_a_loss_that_is_not_finite(value, use_split_weights):
    widths = [8, 24, 4]
    x, y = data(widths, "cross_entropy", rows=10)
    model = network(widths, "relu")
    with torch.no_grad():
        model[1].weight.view(torch.int32)[0, 0] = 0x7FFFFFFF  # the NaN that a GPU produces; rounded it would be -0
        if value == value:
            model[1].weight[0] = value
    losses, _ = train(model, x, y, {"steps": 2, "batch_size": 10, "lr": 0.1})
    assert not torch.isfinite(losses[-1])


@pytest.mark.gpu
def test_a_bf16_step_gives_the_bits_of_whole_weights(monkeypatch):
    torch.manual_seed(0)
    x, y = torch.randn(64, 96, device=DEVICE), torch.randint(10, (64,), device=DEVICE)
    model = network([96, 512, 264, 10], "relu")
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.view(torch.int32)
            bits += bits & 0xFFFF == 0x8000  # a tie would round differently
    twin = copy.deepcopy(model)
    options = {"steps": 1, "batch_size": 32, "optimizer": "sgd", "lr": 0.1, "precision": "bf16", "progress": False}
    history = ol.fit(model, x, y, engine="graph", **options)
    assert "weights split into" in history.plan
    unsplit = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(plan.Planner, "split_weights", unsplit, raising=False)
    expected = ol.fit(twin, x, y, engine="graph", **options)
    assert "weights split into" not in expected.plan
    assert history.losses == expected.losses
    assert_same_weights(model, twin, 0.0)
