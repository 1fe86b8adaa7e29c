"""Every pattern: what it takes, what it leaves, and that the rewritten graph computes what the original does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from onelaunch.activations import ACTIVATIONS
from onelaunch.fuse.patterns import BY_NAME, PATTERNS, find_matches
from tests.fuse.rewritten import Of, Rewritten, assert_same_step, titles_of


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(6, 6, **options)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation_behind_linear(name: str) -> None:
    make = ACTIVATIONS[name].make_module
    model = nn.Sequential(linear(), make(), nn.BatchNorm1d(6), make(), linear(bias=False), make(), nn.BatchNorm1d(6))
    assert_same_step(model, torch.randn(8, 6), [f"linear + {name}"] * 2)


@pytest.mark.parametrize("kind", ["result", "view"])
@pytest.mark.parametrize(
    "epilogue",
    [F.leaky_relu, F.elu, F.gelu, lambda x: F.dropout(torch.tanh(x), 0.5)],
    ids=["leaky", "elu", "gelu", "dropout"],
)
def test_a_caller_may_change_a_result_in_place(epilogue: Callable[..., torch.Tensor], kind: str) -> None:
    """Unless PyTorch's own operation saves it."""
    model = Of(lambda m, x: epilogue(m.a(x)) if kind == "result" else epilogue(m.a(x)).view(-1), a=linear())
    titles = ["linear + gelu"] if epilogue is F.gelu else []
    for aot in (True, False):
        rewritten = Rewritten(model, aot=aot)
        y = rewritten(torch.randn(5, 6))
        y *= 2
        y.sum().backward()
        assert rewritten.titles == titles
    kept = Rewritten(Of(lambda m, x: torch.tanh(m.a(x)), a=linear()))
    kept(torch.randn(5, 6)).sum().backward()
    assert kept.titles == ["linear + tanh"]


def test_other_settings_of_an_activation_are_left_alone() -> None:
    for other in (nn.LeakyReLU(0.2), nn.ELU(2.0), nn.Softplus(beta=2.0), nn.Softplus(threshold=1.0)):
        assert_same_step(nn.Sequential(linear(), other), torch.randn(5, 6), [])


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
def test_linear_of_any_rank_through_aot_autograd(shape: tuple[int, ...]) -> None:
    assert_same_step(nn.Sequential(linear(), nn.GELU()), torch.randn(shape), ["linear + gelu"], aot=True)


def test_inplace_activations_of_values_made_inside() -> None:
    model = Of(lambda m, x: m.b(F.relu(m.a(x), inplace=True) * 2).sigmoid_(), a=linear(), b=linear())
    assert_same_step(model, torch.randn(5, 6), ["linear + relu", "linear + sigmoid"])


def test_a_value_used_twice_is_not_taken() -> None:
    assert_same_step(Of(lambda m, x: (h := m.a(x)) + F.relu(h), a=linear()), torch.randn(5, 6), [])
    model = Of(lambda m, x: (h := m.n(x)) * torch.tanh(h), n=nn.BatchNorm1d(6))
    assert_same_step(model, torch.randn(5, 6), [])


def test_an_input_changed_between_linear_and_activation() -> None:
    """The replacement reads x where the linear layer did."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        h = m.a(x)
        x.add_(1)
        return F.relu(h) + x

    model, x = Of(forward, a=linear()), torch.randn(5, 6)
    rewritten = Rewritten(model)
    with torch.no_grad():  # autograd would refuse the change
        torch.testing.assert_close(rewritten(x), model(x))
    assert rewritten.titles == ["linear + relu"]


def added_to(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h += x
    return h


def partly_replaced(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h[:, 0] = x[:, 0]
    return h


@pytest.mark.parametrize("change", [added_to, partly_replaced])
@pytest.mark.parametrize("aot", [True, False])
def test_a_result_that_is_changed_later_is_not_saved(change: Callable[..., torch.Tensor], aot: bool) -> None:
    """As `h += x` after leaky_relu, whose gradient PyTorch computes from its input and `ol.linear` from its result."""
    for act in (F.leaky_relu, F.elu, F.selu):
        model = Of(lambda m, x, act=act: change(act(m.a(x)), x), a=linear())
        assert_same_step(model, torch.randn(5, 6), [], aot=aot)
    model = Of(lambda m, x: change(F.silu(m.a(x)), x), a=linear())  # which saves its input
    assert_same_step(model, torch.randn(5, 6), ["linear + silu"], aot=aot)


def test_relu_in_place_of_an_input_still_changes_it() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.relu(x, inplace=True), 0.5) * 0 + x

    assert titles_of(forward, torch.randn(4, 4)) == []
    torch.testing.assert_close(Rewritten(forward)(x := torch.randn(4, 4)), x)
    assert (x >= 0).all()


def test_dropout_keeps_the_expected_part_and_its_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Dropout(0.25))
    rewritten = Rewritten(model)
    x = torch.randn(200, 50)
    got, full = rewritten(x), model[:2](x)
    assert rewritten.titles == ["linear + relu + dropout"]
    kept = got != 0
    torch.testing.assert_close(got[kept], full[kept] / 0.75)
    assert abs(kept.sum() / (full != 0).sum() - 0.75) < 0.02
    torch.manual_seed(5)
    first = rewritten(x)
    torch.manual_seed(5)
    assert torch.equal(first, rewritten(x))
    assert not torch.equal(first, rewritten(x))


def test_relu_and_dropout_alone() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(x + 1), 0.5)

    rewritten = Rewritten(forward)
    got = rewritten(torch.ones(1000))
    assert rewritten.titles == ["relu + dropout"]
    assert set(got.unique().tolist()) == {0.0, 4.0}


def test_dropout_in_evaluation_and_of_zero_is_no_dropout() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), nn.Dropout(0.5)).eval()
    assert_same_step(model, torch.randn(5, 6), ["linear + relu"])
    assert_same_step(nn.Sequential(linear(), nn.Dropout(0.0)), torch.randn(5, 6), [])


def test_a_probability_that_is_computed_is_not_taken() -> None:
    def forward(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(x), float(p.sum()))

    assert titles_of(forward, torch.randn(3, 4), torch.tensor([0.25])) == []


def test_weights_that_ol_linear_does_not_take() -> None:
    x = torch.randn(4, 6)
    assert titles_of(lambda x: F.linear(x, torch.ones(6)).relu(), x) == []  # a vector as weight
    assert titles_of(lambda x: F.linear(x, torch.ones(3, 6), torch.ones(4, 3)).relu(), x) == []  # a bias per row


@pytest.mark.parametrize("name", ["softplus", "relu"])
def test_the_type_under_autocast_stays(name: str) -> None:
    """Autocast computes softplus in float32, also behind a bfloat16 linear layer."""
    layer, act = linear(), ACTIVATIONS[name].value
    x = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        rewritten = Rewritten(lambda x: act(layer(x)))
        got, expected = rewritten(x), act(layer(x))
    assert rewritten.titles == [f"linear + {name}"]
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def loss_of(reduction: str = "mean", smoothing: float = 0.0, dtype: torch.dtype | None = None) -> Any:
    layer = nn.Linear(6, 9, bias=False, dtype=dtype)

    def forward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = layer(x).float() if dtype != torch.float64 else layer(x)
        return F.cross_entropy(
            logits.view(-1, 9), target.view(-1), reduction=reduction, label_smoothing=smoothing, ignore_index=2
        )

    return forward, layer


@pytest.mark.parametrize(("reduction", "smoothing"), [("mean", 0.1), ("sum", 0.0)])
def test_linear_and_cross_entropy(reduction: str, smoothing: float) -> None:
    forward, layer = loss_of(reduction, smoothing, torch.float64)
    x, target = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True), torch.randint(9, (2, 5))
    rewritten = Rewritten(forward)
    got, expected = rewritten(x, target), forward(x, target)
    assert rewritten.titles == ["linear + cross_entropy"]
    torch.testing.assert_close(got, expected)
    inputs = [x, layer.weight]
    for one, two in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "log_softmax",
    [lambda z: F.log_softmax(z, -1), lambda z: torch.log_softmax(z, 2), lambda z: z.log_softmax(-1), nn.LogSoftmax(2)],
)
def test_linear_log_softmax_and_nll_loss(log_softmax: Callable[..., torch.Tensor], reduction: str) -> None:
    layer = nn.Linear(6, 9, dtype=torch.float64)
    x, target = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True), torch.randint(9, (2, 5))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(log_softmax(layer(x)).view(-1, 9), target.view(-1), ignore_index=2, reduction=reduction)

    rewritten = Rewritten(forward)
    got, expected = rewritten(x), forward(x)
    assert rewritten.titles == ["linear + log_softmax + nll_loss"]
    torch.testing.assert_close(got, expected)
    inputs = [x, *layer.parameters()]
    for one, two in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    "scale",
    [lambda z: z * 0.25, lambda z: 3 * z, lambda z: (z / 7).mul(2.5), lambda z: torch.div(z.view(-1, 9), -8)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_and_cross_entropy_of_scaled_logits(scale: Callable[..., torch.Tensor], bias: bool) -> None:
    layer = nn.Linear(6, 9, bias, dtype=torch.float64)
    x, target = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True), torch.randint(9, (10,))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scale(layer(x)).view(-1, 9), target)

    rewritten = Rewritten(forward)
    got, expected = rewritten(x), forward(x)
    assert rewritten.titles == ["linear + cross_entropy"]
    torch.testing.assert_close(got, expected)
    inputs = [x, *layer.parameters()]
    for one, two in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("dtype", "scale", "taken"),
    [
        (torch.bfloat16, 0.0625, True), (torch.bfloat16, -8, True), (torch.bfloat16, 0.1, False),
        (torch.bfloat16, float("inf"), False), (torch.float16, 0.5, False), (torch.float32, 0.1, True),
    ],
)  # fmt: skip
def test_logits_of_16_bits_are_scaled_in_the_input_only_where_that_is_exact(
    dtype: torch.dtype, scale: float, taken: bool
) -> None:
    layer, target = nn.Linear(6, 9, dtype=dtype), torch.randint(9, (5,))
    titles = titles_of(lambda x: F.cross_entropy(layer(x).float() * scale, target), torch.randn(5, 6, dtype=dtype))
    assert titles == (["linear + cross_entropy"] if taken else [])


def test_the_loss_keeps_its_type() -> None:
    layer = nn.Linear(6, 9, dtype=torch.bfloat16)
    target = torch.randint(9, (5,))
    rewritten = Rewritten(lambda x: F.cross_entropy(layer(x), target))
    assert rewritten(torch.randn(5, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert rewritten.titles == ["linear + cross_entropy"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_only_a_conversion_that_rounds_nothing_is_left_out(dtype: torch.dtype) -> None:
    """Nor one to float64: the op computes the loss of other types in float32."""
    layer, x, target = nn.Linear(6, 9, dtype=dtype), torch.randn(5, 6).to(dtype), torch.randint(9, (5,))
    for other in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        kept = other == dtype or (other == torch.float32 and dtype != torch.float64)
        titles = ["linear + cross_entropy"] if kept else []
        assert titles_of(lambda x, to=other: F.cross_entropy(layer(x).to(to), target), x) == titles
    for other in {torch.float16, torch.bfloat16, torch.float8_e4m3fn} - {dtype}:
        assert titles_of(lambda x, to=other: F.cross_entropy(layer(x).to(to).to(dtype), target), x) == []


def test_dropout_of_everything_is_left_alone() -> None:
    """PyTorch multiplies by 0, so that an infinity becomes NaN."""
    x = torch.tensor([1.0, float("inf")])
    rewritten = Rewritten(lambda x: F.dropout(F.relu(x), 1.0))
    torch.testing.assert_close(rewritten(x), torch.tensor([0.0, float("nan")]), equal_nan=True)
    assert rewritten.titles == []


def test_losses_that_are_left_alone() -> None:
    layer, x, target = linear(), torch.randn(5, 6), torch.randint(6, (5,))
    soft = torch.rand(5, 6).softmax(1)
    assert titles_of(lambda x: F.cross_entropy(layer(x), soft), x) == []
    assert titles_of(lambda x: F.cross_entropy(layer(x), target, weight=torch.ones(6)), x) == []
    assert titles_of(lambda x: F.cross_entropy(2 / layer(x), target), x) == []
    assert titles_of(lambda x: F.cross_entropy(layer(x) * torch.ones(()), target), x) == []
    assert titles_of(lambda x: F.cross_entropy((z := layer(x)) * z, target), x) == []
    assert titles_of(lambda x: F.cross_entropy(torch.div(layer(x), 2, rounding_mode="floor"), target), x) == []
    assert titles_of(lambda x: F.nll_loss(F.log_softmax(layer(x), 1) * 2, target), x) == []
    assert titles_of(lambda x: F.cross_entropy(layer(x)[:, :, None], target[:, None]), x) == []
    assert titles_of(lambda x: F.cross_entropy(layer(x).view(1, -1), target[:1]), x[0]) == []
    assert titles_of(lambda x: F.nll_loss(layer(x), target), x) == []
    assert titles_of(lambda x: F.nll_loss(F.log_softmax(layer(x), 0), target), x) == []
    assert titles_of(lambda x: F.nll_loss(F.log_softmax(layer(x), 1, dtype=torch.float64), target), x) == []
    assert titles_of(lambda x: F.nll_loss(F.log_softmax(layer(x), 1).log_softmax(1), target), x) == []
    assert titles_of(lambda x: F.cross_entropy(F.log_softmax(layer(x), 1), target), x) == []
    assert titles_of(lambda x: F.nll_loss(F.log_softmax(layer(x), 1), target, torch.ones(6)), x) == []


@pytest.mark.parametrize("change", [torch.zero_, nn.Hardtanh(0, 0.1, True)])
def test_features_changed_before_the_loss_are_not_chunked(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    layer = linear()

    def forward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = x * 1
        logits = layer(x)
        change(x)
        return F.cross_entropy(logits, target + x[:, 0].long())

    x, target = torch.randn(5, 6), torch.randint(6, (5,))
    rewritten = Rewritten(forward)
    torch.testing.assert_close(rewritten(x, target), forward(x, target))
    assert rewritten.titles == []


def test_a_tensor_subclass_computes_the_same() -> None:
    class Named(torch.Tensor):
        pass

    layer = linear()
    x = torch.randn(5, 6).as_subclass(Named)
    got = Rewritten(lambda x: F.relu(layer(x)))(x)
    torch.testing.assert_close(got.as_subclass(torch.Tensor), F.relu(layer(x)).as_subclass(torch.Tensor))


def test_patterns_have_names_costs_and_conditions() -> None:
    """Each pattern that trains, by a model of its own; nothing pays on a CPU by the device, and float64 pays nowhere."""
    layer, head, query, key, unaligned = linear(), nn.Linear(6, 5000), linear(), linear(), nn.Linear(65, 64)
    small = nn.Sequential(linear(), nn.Tanh(), linear())
    target = torch.randint(5000, (12,))

    def forward(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        h = F.dropout(F.gelu(layer(F.dropout(F.relu(x), 0.5))), 0.5)
        h = small(query(h) * key(h))
        mask = torch.ones(12, 12, dtype=torch.bool).tril()
        h = F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=mask)[0]
        return F.cross_entropy(head(h), target) + unaligned(scores[:, :65]).sum()

    for dtype in (torch.float32, torch.float64):
        for module in (layer, head, query, key, unaligned, small):
            module.to(dtype)
        rewritten = Rewritten(forward, names=())
        rewritten(torch.randn(12, 6, dtype=dtype), torch.randn(12, 5000, dtype=dtype, requires_grad=True))
        matches = find_matches(rewritten.graphs[0].graph)
        names = {pattern.name for pattern in PATTERNS}
        assert {match.pattern.name for match in matches} | {"convolution"} == set(BY_NAME) == names
        for match in matches:
            cost = match.pattern.cost(match)
            assert cost.bytes > 0
            assert cost.launches >= 1 or match.arguments.get("index")
            assert cost.flops > 0
            pays = {"attention": True, "aligned_linear": False}.get(match.pattern.name, dtype == torch.float32)
            assert match.pattern.pays(match) == pays


class Attention(nn.Module):
    """Query, key and value of one input, with heads made by `view`, and a gated MLP."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (linear(bias=bias) for _ in range(3))
        self.gate, self.up, self.down = linear(bias=bias), linear(bias=bias), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part(x).view(*x.shape[:-1], 2, 3).transpose(-2, -3) for part in (self.query, self.key, self.value))
        x = x + F.scaled_dot_product_attention(*heads).transpose(-2, -3).flatten(-2)
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("aot", [True, False])
def test_layers_with_one_input_are_one_product(bias: bool, aot: bool) -> None:
    rewritten = assert_same_step(
        Attention(bias), torch.randn(2, 4, 6), ["linear (3 as one)"] * 3 + ["linear (2 as one)"] * 2, aot=aot
    )
    products = [node for node in rewritten.graphs[0].graph.nodes if node.target is F.linear]
    assert len(products) == 3


def test_layers_with_one_input_that_stay_apart() -> None:
    def between(model: Of, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        first = model.a(x)
        x += 1
        return first + model.b(x)

    def between_by_a_module(model: Of, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        first = model.a(x)
        nn.Hardtanh(inplace=True)(x)
        return first + model.b(x)

    def result_changed(model: Of, x: torch.Tensor) -> torch.Tensor:
        first, second = model.a(x), model.b(x)
        return first.view(-1).mul_(2).view(-1, 6) + second

    def result_changed_by_a_module(model: Of, x: torch.Tensor) -> torch.Tensor:
        return nn.ReLU6(inplace=True)(model.a(x)) * model.b(x)

    def scaled(model: Of, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, model.a.weight * 2) + F.linear(x, model.b.weight)  # type: ignore[union-attr]

    for function in (result_changed, result_changed_by_a_module, scaled):
        assert_same_step(Of(function, a=linear(), b=linear()), torch.randn(4, 6), [])
    with torch.no_grad():  # with gradients PyTorch itself refuses
        for function in (between, between_by_a_module):
            model, x = Of(function, a=linear(), b=linear()), torch.randn(4, 6)
            rewritten = Rewritten(model)
            torch.testing.assert_close(rewritten(x), model(x))
            assert rewritten.titles == []


@pytest.mark.parametrize("use", [torch.squeeze, torch.mean, torch.sum])
def test_a_row_with_one_output_becomes_a_number(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert_same_step(Of(lambda model, x: use(model.a(x)), a=nn.Linear(6, 1)), torch.randn(1, 6), [])


STEPS = (
    "linear", "norm", "activation", "inplace", "dropout", "residual", "branch", "view", "iadd", "twice", "parallel",
)  # fmt: skip


class Chain(nn.Module):
    """Operations in the order that `steps` names; `choices` are the activations."""

    def __init__(self, steps: list[tuple[str, str]]) -> None:
        super().__init__()
        self.steps, self.other = steps, linear()
        self.parts = nn.ModuleList(
            linear() if step in ("linear", "parallel") else nn.BatchNorm1d(6) if step == "norm" else nn.Identity()
            for step, _ in steps
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        saved, value = x, x * 1
        for part, (step, name) in zip(self.parts, self.steps, strict=True):
            act = ACTIVATIONS[name].value
            if step in ("linear", "norm"):
                value = part(value)
            elif step == "activation":
                value = act(value)
            elif step == "inplace":
                value = F.relu(value * 1 if value is saved else value, inplace=True)
            elif step == "dropout":
                value = F.dropout(value, 0.0)
            elif step == "residual":
                value, saved = value + saved, value
            elif step == "branch":
                value = act(value) * torch.sigmoid(value)
            elif step == "view":
                value = value.reshape(-1).view(-1, 6)
            elif step == "iadd":
                value = value * 1
                value += 1
            elif step == "parallel":
                value = part(value) * act(self.other(value))
            else:
                value = value + act(value)
        return value


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(list(ACTIVATIONS))), min_size=1, max_size=8))
def test_random_graphs_compute_the_same(steps: list[tuple[str, str]]) -> None:
    assume(sum(step == "norm" for step, _ in steps) <= 3)  # each may amplify rounding a hundredfold
    torch.manual_seed(len(steps))
    assert_same_step(Chain(steps), torch.randn(4, 6))


def test_relu_and_dropout_pay_where_their_input_is_in_memory() -> None:
    convolution, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    for function, expected in (
        (lambda x: x, True),
        (convolution, True),
        (lambda x: norm(convolution(x)), False),
        (lambda x: convolution(x) + 1, False),
    ):
        rewritten = Rewritten(lambda x, function=function: F.dropout(F.relu(function(x)), 0.5))
        rewritten(torch.randn(2, 3, 5, 5))
        (match,) = rewritten.matches
        assert match.pattern.name == "relu_dropout"
        assert match.pattern.pays(match) is expected
