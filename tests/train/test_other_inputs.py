"""What only the eager engine takes: several inputs, a DataLoader, a loss function of the user's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import onelaunch as ol
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import assert_same_course, assert_same_weights, problem
from tests.train.checkpointed import same

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"epochs": 3, "batch_size": 20, "optimizer": "sgd", "lr": 0.1, "progress": False}


class TwoInputs(nn.Module):
    """Takes uint8 pixels beside float features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.drop = nn.Linear(7, 5), nn.Linear(3, 5), nn.Dropout(0.3)
        self.out = nn.Linear(5, 4)

    def forward(self, features: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.tanh(self.left(features) + self.right(pixels))))


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(7, 4)


def own_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, y)


def test_a_tuple_of_inputs_is_passed_to_the_model():
    x, y = problem("cross_entropy")
    pixels = torch.randint(256, (len(x), 3), dtype=torch.uint8)
    model, twin = TwoInputs(), TwoInputs()
    model.drop.p = twin.drop.p = 0.0
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    expected = []
    for epoch in range(3):
        for rows in ol.permutation(len(x), 0, epoch).split(20):
            loss = F.cross_entropy(twin(x[rows], pixels[rows].float() / 255), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    history = ol.fit(model, (x, pixels.numpy()), y, validation=((x[:30], pixels[:30]), y[:30]), **OPTIONS)
    assert history.engine == "eager"
    assert "x has several inputs" in history.reason
    assert_same_course(history.losses, expected, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)
    found = ol.predict(model, (x[:30], pixels[:30]))
    assert (found == y[:30].numpy()).mean() == pytest.approx(history.epochs[-1]["validation"]["accuracy"])
    held = ol.fit(TwoInputs(), (x, pixels), y, validation=0.2, early_stopping=2, metrics=("f1",), **OPTIONS)
    assert held.best_epoch is not None


def test_a_loss_function_is_followed():
    x, y = problem("mse")
    model, named = linear(), linear()
    history = ol.fit(
        model, x, y, loss=lambda output, target: ((output - target) ** 2).mean(), validation=0.2, **OPTIONS
    )
    expected = ol.fit(named, x, y, loss="mse", engine="eager", validation=0.2, **OPTIONS)
    assert_same_course(history.losses, expected.losses, LOSS_TOLERANCE)
    assert_same_weights(model, named, WEIGHT_TOLERANCE)
    assert history.epochs[-1]["accuracy"] is None
    loss = expected.epochs[-1]["validation"]["loss"]
    assert history.epochs[-1]["validation"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_loss_function_takes_whatever_the_model_returns():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = nn.Linear(7, 1), nn.Linear(7, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.mean(x), self.spread(x)

    x, y = problem("mse", outputs=1)
    history = ol.fit(
        Pair(),
        x,
        y,
        loss=lambda out, target: F.gaussian_nll_loss(out[0], target, out[1].exp()),
        validation=0.2,
        **OPTIONS,
    )
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]


def loader(batch_size: int | None = 20, **options) -> DataLoader:
    x, y = torch.arange(1050.0).reshape(150, 7) / 1000, torch.arange(150) % 4
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **options)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True}])
def test_a_data_loader_gives_the_batches(options):
    seen: list[torch.Tensor] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                seen.append(x[:, 0].clone())
            return super().forward(x)

    without = {name: value for name, value in OPTIONS.items() if name != "batch_size"}
    history = ol.fit(Watched(7, 4), loader(**options), validation=loader(), **without)
    steps = 7 if "drop_last" in options else 8
    assert len(history.losses) == len(seen) == 3 * steps
    epochs = [torch.cat(seen[first : first + steps]) for first in range(0, 3 * steps, steps)]
    if "drop_last" not in options:
        assert all(torch.equal(epoch.sort().values, torch.arange(150) * 7 / 1000) for epoch in epochs)
    assert torch.equal(epochs[0], epochs[1]) != bool(options)
    assert history.epochs[0]["validation"] is not None


def test_a_run_on_a_data_loader_resumes_to_the_same_bits(tmp_path):
    """Also the numbers that the loader's dataset draws, and the dropout beside them."""

    class Noisy(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + torch.randn(7), y

    def run(model: nn.Module, epochs: int, **options) -> ol.History:
        batches = DataLoader(Noisy(*loader().dataset[:]), batch_size=20, shuffle=True)
        return ol.fit(model, batches, epochs=epochs, progress=False, **options)

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(7, 8), nn.Dropout(0.2), nn.AlphaDropout(0.1), nn.Linear(8, 4))
    cut, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    expected = run(whole, 4)
    path = tmp_path / "run.safetensors"
    run(cut, 2, checkpoint=path)
    assert run(resumed, 4, checkpoint=path, resume=True).losses == expected.losses
    assert same(resumed, whole)


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(7), 0


X, Y = torch.randn(20, 7), torch.arange(20) % 4
MISTAKES = {
    "y beside a loader": ({"x": loader(), "y": Y}, r"x is a DataLoader, which has the targets too: leave y out"),
    "y missing": ({"x": X}, r"y is missing"),
    "another batch size": ({"x": loader(), "batch_size": 7}, r"batch_size=7 does not go with a DataLoader, whose batches"),
    "weights of a loader": ({"x": loader(), "sample_weight": torch.ones(150)}, r"sample_weight does not go with a DataLoader"),
    "class weights of a loader": ({"x": loader(), "class_weight": "balanced"}, r"class_weight does not go with a DataLoader"),
    "fraction of a loader": ({"x": loader(), "validation": 0.1}, r"validation=0.1 cannot hold rows out of a DataLoader"),
    "loader of no pairs": ({"x": DataLoader([1, 2, 3, 4])}, r"its batches must be pairs \(x, y\)"),
    "endless loader": ({"x": DataLoader(Endless(), batch_size=2)}, r"x is a DataLoader of unknown length"),
    "endless validation": (
        {"x": X, "y": Y, "validation": DataLoader(Endless(), batch_size=2)}, r"validation is a DataLoader of unknown length",
    ),
    "all rows dropped": ({"x": loader(400, drop_last=True)}, r"x .* has no batch: drop_last=True drops its 150 rows"),
    "all validation rows dropped": (
        {"x": X, "y": Y, "validation": loader(400, drop_last=True)}, r"validation is a DataLoader that has no batch",
    ),
    "loader of no rows": ({"x": DataLoader(TensorDataset(X[:0], Y[:0]))}, r"x is a DataLoader that has no rows: pass"),
    "loader of rows": ({"x": loader(None)}, r"x is a DataLoader of single rows, not of batches: pass a batch_size"),
    "validation of rows": (
        {"x": X, "y": Y, "validation": loader(None)}, r"validation is a DataLoader of single rows, not of batches",
    ),
    "native engine": ({"x": loader(), "engine": "cpu"}, r"engine='cpu' cannot run this: x is a DataLoader"),
    "loss by the inner name": ({"x": X, "y": Y, "loss": "custom"}, r"loss='custom' is not known: pass the function itself"),
    "class as loss": ({"x": X, "y": Y, "loss": nn.CrossEntropyLoss}, r"loss=nn.CrossEntropyLoss is a class.*: pass nn.Cross"),
    "class beside a loader": ({"x": loader(), "loss": nn.L1Loss}, r"loss=nn.L1Loss is a class.*: pass nn.L1Loss\(\)"),
    "loss of no number": ({"x": X, "y": Y, "loss": lambda a, b: a}, r"loss must return a tensor with one number.*\[20, 4\]"),
    "weights of a function": (
        {"x": X, "y": Y, "loss": own_loss, "sample_weight": torch.ones(20)},
        r"sample_weight does not go with a loss function of your own",
    ),
    "metrics of a function": (
        {"x": X, "y": Y, "loss": own_loss, "metrics": ("f1",), "validation": 0.2}, r"metrics='f1' needs a named loss",
    ),
    "lengths of inputs": ({"x": (X, X[:3]), "y": Y}, r"x\[1\] has 3 rows and y has 20"),
    "number of inputs": ({"x": (X, X), "y": Y}, r"model cannot take x with rows of shape \(7,\), \(7,\)"),
    "validation inputs": ({"x": X, "y": Y, "validation": ((X, X), Y)}, r"validation\[0\] has 2 inputs, x has 1"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_line(mistake):
    changes, message = MISTAKES[mistake]
    given = {"epochs": 1, "progress": False, **changes}
    with pytest.raises(ol.OnelaunchError, match=message) as caught:
        ol.fit(linear(), given.pop("x"), given.pop("y", None), **given)
    assert "\n" not in str(caught.value)


def test_one_output_for_two_classes_gets_the_right_advice() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    with pytest.raises(ol.OnelaunchError, match="it has one output; pass loss='bce_with_logits'"):
        ol.fit(model, torch.randn(20, 3), torch.arange(20) % 2, epochs=1, progress=False)
