"""Code keeps its own global variables, whatever `sys.modules` has under the name of its module."""

from __future__ import annotations

import copy
import importlib.util
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from tests.step.loops import plain_losses
from tests.step.tape import taped_step

pytestmark = [
    pytest.mark.usefixtures("no_code"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo's own
]
CODE = """
import torch
import torch.nn.functional as F
from torch import nn

MASK = {mask}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 * MASK

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 * MASK


class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x) * MASK


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer(8, 4)

    def forward(self, x):
        return Double.apply(F.relu(self.layer(x))) * MASK


def loss(output, target):
    return F.mse_loss(output * MASK, target)
"""
Make = Callable[[Path], Any]


def module(path: Path, name: str, mask: int, registered: bool = True) -> Any:
    path.write_text(CODE.format(mask=mask))
    spec: Any = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    if registered:
        sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def first_of_two(folder: Path) -> Any:
    found = module(folder / "one.py", "model_of_two", 1)
    module(folder / "two.py", "model_of_two", 5)
    return found


def second_of_two(folder: Path) -> Any:
    module(folder / "one.py", "model_of_two", 1)
    return module(folder / "two.py", "model_of_two", 5)


def executed_again(folder: Path) -> Any:
    found = module(folder / "one.py", "model_again", 1)
    kept = types.SimpleNamespace(**vars(found))
    module(folder / "one.py", "model_again", 5)
    return kept


def unregistered(folder: Path) -> Any:
    return module(folder / "one.py", "model_unregistered", 3, registered=False)


def with_a_dash(folder: Path) -> Any:
    return module(folder / "one.py", "model-with-a-dash", 3, registered=False)


def run_as_a_path(folder: Path) -> Any:
    (folder / "one.py").write_text(CODE.format(mask=3))
    return types.SimpleNamespace(**runpy.run_path(str(folder / "one.py")))


def executed_as_main(folder: Path) -> Any:
    variables = {"__name__": "__main__"}
    exec(CODE.format(mask=3), variables)
    return types.SimpleNamespace(**variables)


def layers_of_the_other(folder: Path) -> Any:
    """The model of one file, with a layer of the other file of that name."""
    one = module(folder / "one.py", "model_of_two", 1)
    two = module(folder / "two.py", "model_of_two", 5)

    class Mixed(two.Net):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = one.Layer(8, 4)

    return types.SimpleNamespace(Net=Mixed, loss=one.loss)


MAKES = [
    first_of_two, second_of_two, executed_again, unregistered, with_a_dash, run_as_a_path, executed_as_main,
    layers_of_the_other,
]  # fmt: skip
makes = pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)


@pytest.fixture(autouse=True)
def no_modules_left() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith("model_")]:
        del sys.modules[name]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 8), torch.randn(6, 4)


def expected_losses(model: nn.Module, loss: Any) -> list[float]:
    return plain_losses(model, torch.optim.SGD(model.parameters(), lr=1e-3), [batch()] * 5, loss=loss)


@makes
def test_fuse(make: Make, tmp_path: Path) -> None:
    model, (x, _) = make(tmp_path).Net(), batch()
    torch.testing.assert_close(ol.fuse(model)(x), model(x))
    torch.testing.assert_close(torch.compile(model, backend="onelaunch")(x), model(x))


def test_torch_compile_is_right_where_the_model_has_no_layers_of_its_own(tmp_path: Path) -> None:
    """What PyTorch does by itself: the code of the model's forward is what it compiles, with the variables of that code."""
    model, (x, _) = first_of_two(tmp_path).Net(), batch()
    model.layer = nn.Linear(8, 4)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


@makes
@pytest.mark.parametrize("taped", [False, True])
def test_train_step(make: Make, taped: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code = make(tmp_path)
    model, (x, y) = code.Net(), batch()
    other, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=1e-3)
    if taped:
        request.getfixturevalue("tapes")
    step: Any = taped_step(model, optimizer, code.loss)[0] if taped else ol.train_step(model, code.loss, optimizer)
    losses = [float(step(x, y)) for _ in range(5)]
    torch.testing.assert_close(losses, expected_losses(other, code.loss), rtol=1e-5, atol=1e-6)
    assert not step._plain.compilers_failure
    assert not taped or step.reason == ""


@makes
def test_fit(make: Make, tmp_path: Path) -> None:
    code = make(tmp_path)
    model, (x, y) = code.Net(), batch()
    expected = expected_losses(copy.deepcopy(model), code.loss)
    history = ol.fit(model, x, y, epochs=5, batch_size=6, loss=code.loss, optimizer="sgd", lr=1e-3, progress=False)
    torch.testing.assert_close(history.losses, expected, rtol=1e-5, atol=1e-6)


@makes
def test_explain(make: Make, tmp_path: Path) -> None:
    explanation = ol.explain(make(tmp_path).Net().eval(), batch()[0])
    assert "linear" in str(explanation)


def test_both_of_two_files_after_each_other(tmp_path: Path) -> None:
    """Also once more, with another number of rows, after the second has taken the first one's place."""
    one = module(tmp_path / "one.py", "model_of_two", 1).Net()
    first = ol.fuse(one)
    x = torch.randn(3, 8)
    torch.testing.assert_close(first(x), one(x))
    two = module(tmp_path / "two.py", "model_of_two", 5).Net()
    second = ol.fuse(two)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(second(x), two(x))
        torch.testing.assert_close(first(x), one(x))


def test_a_variable_that_changes_counts(tmp_path: Path) -> None:
    code = first_of_two(tmp_path)
    model, (x, _) = code.Net(), batch()
    fused = ol.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    code.MASK = 3
    torch.testing.assert_close(fused(x), model(x))
    code.UNREAD = 1
    torch.testing.assert_close(fused(x), model(x))


def test_the_command_line_explains_a_file_whose_forward_reads_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "my-model.py"
    path.write_text(CODE.format(mask=3) + "\n\nmodel = Net()\n")
    command = [sys.executable, "-m", "onelaunch", "explain", f"{path}:model", "--input", "6x8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "linear" in done.stdout
