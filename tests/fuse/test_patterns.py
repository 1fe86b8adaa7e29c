"""Every pattern, in every spelling: found, fused, and equal to the original in float64 to 1e-12 in both modes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.fuse import calls
from tests.fuse.compare import assert_same, fused_names

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")

ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
}


def rows(n: int = 9, k: int = 12) -> torch.Tensor:
    return torch.randn(n, k, dtype=torch.float64)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_activation_dropout(name: str, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(12, 7, bias), ACTIVATIONS[name](), nn.Dropout(0.0)).double()
    fused = ol.fuse(model)
    assert fused_names(fused, True) == [f"linear + {name} + dropout"]
    assert_same(model, fused, rows())
    assert_same(model, fused, torch.randn(2, 3, 12, dtype=torch.float64))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(9, 5), (4, 5, 6), (3, 5, 4, 2)])
def test_batch_norm_activation(name: str, shape: tuple[int, ...]) -> None:
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](5)
    model = nn.Sequential(norm, ACTIVATIONS[name]()).double()
    fused = ol.fuse(model)
    assert fused_names(fused, True) == [f"batch_norm + {name}"]
    assert_same(model, fused, torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("options", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}])
def test_batch_norm_options(options: dict[str, bool]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(12, **options), nn.ReLU()).double()
    assert_same(model, ol.fuse(model), rows())


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_batch_norm_folds_in_evaluation_only(followed: bool, bias: bool) -> None:
    tail = [nn.ReLU(), nn.Dropout(0.0)] if followed else []
    model = nn.Sequential(nn.Linear(12, 7, bias), nn.BatchNorm1d(7), *tail).double()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    nn.init.uniform_(norm.weight)
    norm.running_mean.uniform_()  # type: ignore[union-attr]
    fused = ol.fuse(model)
    names = " + relu + dropout" if followed else ""
    assert fused_names(fused, False) == [f"linear + batch_norm{names}"]
    assert fused_names(fused, True) == ([f"batch_norm{names}"] if followed else [])
    assert_same(model, fused, rows())


def test_the_fold_follows_its_weights() -> None:
    model = nn.Sequential(nn.Linear(12, 7), nn.BatchNorm1d(7)).double().eval()
    fused = ol.fuse(model)
    x = rows()
    for change in ("train", "load", "move", "replace"):
        with torch.no_grad():
            torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
            match change:
                case "train":
                    fused.train()(x)
                    fused.eval()
                    next(model.parameters()).add_(1)
                case "load":
                    model.load_state_dict(
                        {k: torch.rand_like(v.double()).to(v.dtype) for k, v in model.state_dict().items()}
                    )
                case "move":
                    fused.to(torch.float32).to(torch.float64)
                case "replace":
                    fused[0].weight = nn.Parameter(torch.randn(7, 12, dtype=torch.float64))
            torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)


def test_the_fold_in_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(12, 7), nn.BatchNorm1d(7), nn.ReLU()).double().eval()
    fused = ol.fuse(model)
    x = rows()
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
    fused(x).sum().backward()


def test_the_fold_is_made_again_in_the_same_memory() -> None:
    """A captured CUDA graph goes on reading it."""
    model = nn.Sequential(nn.Linear(12, 7), nn.BatchNorm1d(7)).double().eval()
    fused = ol.fuse(model)
    with torch.no_grad():
        fused(rows())
        before = calls._folded[fused[0]].weight
        value = before.clone()
        model[0].weight.mul_(2)
        fused(rows())
    assert calls._folded[fused[0]].weight is before
    assert not torch.equal(before, value)


def test_linear_on_three_axes_does_not_fold() -> None:
    """BatchNorm1d normalises axis 1 of [n, c, l]; the layer's features are axis 2."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(3)).double()
    assert_same(model, ol.fuse(model), torch.randn(6, 3, 4, dtype=torch.float64))


class Spellings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(8))
        self.norm = nn.BatchNorm1d(12)
        self.p = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.layers[0](x))
        x = torch.relu(self.layers[1](x))
        x = self.layers[2](x).relu()
        x = F.dropout(F.gelu(self.layers[3](x), approximate="tanh"), self.p, training=self.training)
        x = F.dropout(self.layers[4](x).tanh(), p=self.p, training=self.training)
        x = F.silu(F.linear(x, self.layers[5].weight, self.layers[5].bias))
        x = self.layers[6](x).sigmoid_()
        norm = self.norm
        x = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training, 0.1, 1e-5)
        x = torch.dropout(F.leaky_relu(x), self.p, self.training)
        return F.relu(self.layers[7](x), inplace=True)


def test_functions_and_methods() -> None:
    model = Spellings().double()
    fused = ol.fuse(model)
    assert fused_names(fused, True) == [
        "linear + relu", "linear + relu", "linear + relu", "linear + gelu_tanh + dropout", "linear + tanh + dropout",
        "linear + silu", "linear + sigmoid", "batch_norm + leaky_relu + dropout", "linear + relu",
    ]  # fmt: skip
    assert_same(model, fused, rows())
    model.p = fused.p = 0.5  # read by the forward: the trace made with 0 must not be used any more
    x = rows()
    assert not torch.equal(fused(x), fused(x))
    assert torch.equal(fused.eval()(x), fused(x))


class Loss(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head = nn.Linear(12, 5)
        self.kind = kind
        self.module: nn.Module = nn.CrossEntropyLoss(label_smoothing=0.1)
        if kind == "two modules":
            self.module = nn.NLLLoss(ignore_index=1)
        self.softmax = nn.LogSoftmax(dim=-1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(x)
        if self.kind == "function":
            return F.cross_entropy(logits, target, label_smoothing=0.2, reduction="sum"), logits
        if self.kind == "made on the way":
            return nn.CrossEntropyLoss()(logits, target), logits
        if self.kind == "two functions":
            return F.nll_loss(F.log_softmax(logits, dim=1), target), logits
        if self.kind == "two modules":
            return self.module(self.softmax(logits), target), logits
        return self.module(logits, target), logits


@pytest.mark.parametrize("kind", ["function", "module", "made on the way", "two functions", "two modules"])
def test_losses(kind: str) -> None:
    model = Loss(kind).double()
    fused = ol.fuse(model)
    expected = "log_softmax + nll_loss" if kind.startswith("two") else "cross_entropy"
    assert fused_names(fused, True) == [expected]
    assert_same(model, fused, rows(), torch.randint(5, (9,)))


def test_relu_dropout() -> None:
    model = nn.Sequential(nn.LayerNorm(12), nn.ReLU(), nn.Dropout(0.4)).double()
    fused = ol.fuse(model)
    assert fused_names(fused, True) == ["relu + dropout"]
    assert fused_names(fused, False) == []
    x = rows(200)
    y = fused(x)
    kept = y != 0
    torch.testing.assert_close(y, torch.where(kept, model[:2](x) / 0.6, 0), rtol=0, atol=1e-12)
    assert 0.25 < kept.double().mean() < 0.35
    torch.testing.assert_close(fused.eval()(x), model.eval()(x), rtol=0, atol=0)


def test_dropout_drops_what_it_should_and_no_gradient_passes_there() -> None:
    model = nn.Sequential(nn.Linear(12, 64), nn.Sigmoid(), nn.Dropout(0.25)).double()
    fused = ol.fuse(model)
    x = rows(400).requires_grad_()
    y = fused(x)
    kept = y.detach() != 0
    assert abs(kept.double().mean().item() - 0.75) < 0.02
    expected = torch.where(kept, model[:2](x) / 0.75, 0)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    got, wanted = (torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0] for out in (y, expected))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


class Spelled(nn.Module):
    """As transformers writes its gelus."""

    def __init__(self, factor: float = 0.044715) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + self.factor * torch.pow(x, 3.0))))


class Swish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid() * x


def test_activations_that_are_spelled_out() -> None:
    model = nn.Sequential(nn.Linear(12, 12), Spelled(), nn.Dropout(0.0), nn.LayerNorm(12), Swish()).double()
    fused = ol.fuse(model)
    assert fused_names(fused, True) == ["linear + gelu_tanh (spelled out) + dropout", "silu (spelled out)"]
    assert_same(model, fused, rows())
    (first, second) = ol.explain(model, rows()).groups
    assert first.before.forward.launches == 9  # the product and eight elementary operations; nothing is dropped
    assert first.after.forward.launches == 1
    assert second.before.forward.launches == 2
    other = nn.Sequential(nn.Linear(12, 12), Spelled(0.05), nn.Linear(12, 12), nn.ReLU()).double()
    fused = ol.fuse(other)
    assert fused_names(fused, True) == ["linear + relu"]
    assert_same(other, fused, rows())
    for tree in (model, fused_again := ol.fuse(model)):
        tree[1].factor = 0.1  # type: ignore[union-attr]
    assert_same(model, fused_again, rows())


def test_across_nested_sequentials_and_residual_branches() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(12, 12))), nn.Sequential(nn.ReLU()))
            self.drop = nn.Dropout(0.0)
            self.norm = nn.BatchNorm1d(12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(self.inner(x)) + F.relu(self.norm(x))

    model = nn.Sequential(Residual(), Residual()).double()
    fused = ol.fuse(model)
    assert sorted(fused_names(fused, True)) == 2 * ["batch_norm + relu"] + 2 * ["linear + relu + dropout"]
    assert_same(model, fused, rows())
