"""A mistake in the arguments of `ol.train_step` or of its step gets one line, and an error leaves no gradients."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from tests.conftest import LOSS_TOLERANCE
from tests.reference import assert_same_course
from tests.step.loops import batches, network, plain_losses


@pytest.fixture(autouse=True)
def patched(no_code: None) -> None:
    """Without code generation."""
    torch.manual_seed(0)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise KeyError("in backward")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_exception_leaves_no_gradients(accumulate: int) -> None:
    model, fails = network(), [False]
    model[0].register_forward_hook(lambda module, args, y: Fails.apply(y) if fails[0] else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ol.train_step(model, F.cross_entropy, optimizer, accumulate=accumulate, compile=False)
    (x, y), *_ = batches(1)
    with pytest.raises(ol.OnelaunchError):
        step(x[:, :3], y)
    fails[0] = True
    with pytest.raises(KeyError, match="in backward"):
        step(x, y)
    assert all(parameter.grad is None for parameter in model.parameters())
    fails[0] = False
    other = copy.deepcopy(model)
    data = batches(2 * accumulate)
    losses = [float(step(x, y)) for x, y in data]
    expected = plain_losses(other, torch.optim.SGD(other.parameters(), lr=0.1), data, every=accumulate)
    assert_same_course(losses, expected, LOSS_TOLERANCE)


def test_errors_in_one_line() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"^model is a int: pass a torch\.nn\.Module$"):
        ol.train_step(3, None, optimizer)
    with pytest.raises(TypeError, match=r"^loss='mse' is not a function"):
        ol.train_step(model, "mse", optimizer)
    with pytest.raises(TypeError, match=r"^loss=nn\.CrossEntropyLoss is a class, .*: pass nn\.CrossEntropyLoss\(\)$"):
        ol.train_step(model, nn.CrossEntropyLoss, optimizer)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^optimizer=LBFGS needs a closure.*: pass another, such as torch\.optim\.Adam"
    ):
        ol.train_step(model, F.cross_entropy, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match=r"^optimizer='adam' is not a torch\.optim\.Optimizer: pass one, such as torch"):
        ol.train_step(model, None, "adam")
    with pytest.raises(TypeError, match=r"^train_step has no argument 'clip'; did you mean 'clip_norm'\?$"):
        ol.train_step(model, None, optimizer, clip=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^train_step has no argument 'max_norm': here it is clip_norm=$"):
        ol.train_step(model, None, optimizer, max_norm=1.0)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"^train_step has no argument 'mode': here it is compile='max-autotune', or no arg"
    ):
        ol.train_step(model, None, optimizer, mode="reduce-overhead")  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"^train_step was called without optimizer: call train_step\(model, loss, optimizer\)$"
    ):
        ol.train_step(model, optimizer)  # type: ignore[call-arg, arg-type]
    with pytest.raises(
        TypeError, match=r"^train_step was called without model and loss: call train_step\(model, loss, "
    ):
        ol.train_step(optimizer=optimizer)  # type: ignore[call-arg]
    for clip_norm in (0, -1.0, "1", True, float("nan")):
        with pytest.raises(ValueError, match=r"^clip_norm=.* must be a number above 0"):
            ol.train_step(model, None, optimizer, clip_norm=clip_norm)
    with pytest.raises(TypeError, match=r"^capture='no' must be True or False$"):
        ol.train_step(model, None, optimizer, capture="no")  # type: ignore[arg-type]
    for compile in ("reduce-overhead", 1, None):
        with pytest.raises(TypeError, match=r"^compile=.* must be True, False or 'max-autotune'$"):
            ol.train_step(model, None, optimizer, compile=compile)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^model is a ModuleList, which has no forward: pass a module that has, such as"
    ):
        ol.train_step(nn.ModuleList([model]), None, optimizer)
    for autocast in ("fp8", 16, ["bf16"], torch.int8, torch.float64):
        with pytest.raises(ValueError, match=r"^autocast=.* is not known: pass 'bf16'"):
            ol.train_step(model, None, optimizer, autocast=autocast)
    with pytest.raises(ValueError, match=r"^accumulate=0 must be 1 or more"):
        ol.train_step(model, None, optimizer, accumulate=0)
    with pytest.raises(TypeError, match=r"^scaler=True is not a torch\.amp\.GradScaler"):
        ol.train_step(model, None, optimizer, scaler=True)
    (x, y), *_ = batches(1)
    with pytest.raises(ValueError, match=r"^step has no inputs"):
        ol.train_step(model, F.cross_entropy, optimizer)()
    with pytest.raises(ValueError, match=r"^step has no target: pass the model's inputs and then the target"):
        ol.train_step(model, F.cross_entropy, optimizer)(x)
    with pytest.raises(ValueError, match=r"^step takes one batch, not a DataLoader: for x, y in loader: step\(x, y\)"):
        ol.train_step(model, F.cross_entropy, optimizer)(torch.utils.data.DataLoader([(x, y)]))
    with pytest.raises(ValueError, match=r"^step\(input, target\) has no target, which is the last argument, without"):
        ol.train_step(model, F.cross_entropy, optimizer)(input=x, target=y)
    with pytest.raises(TypeError, match=r"^loss is an optimizer: the order is train_step\(model, loss, optimizer\)"):
        ol.train_step(model, optimizer, F.cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"given: check .*; with loss=None all arguments go to the model, else pass loss=$"
    ):
        ol.train_step(model, None, optimizer, compile=False)(x, y)
    empty = nn.Linear(8, 4, device="meta")
    with pytest.raises(ValueError, match=r"^model=Linear is on meta, without values: create it on another device"):
        ol.train_step(empty, F.cross_entropy, torch.optim.SGD(empty.parameters()))
    with pytest.raises(ValueError, match=r": move the model and its inputs to one device"):
        ol.train_step(model, F.cross_entropy, optimizer, compile=False)(x.to("meta"), y)
    with pytest.raises(ValueError, match=r"^optimizer holds no parameter of model"):
        ol.train_step(model, F.cross_entropy, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(ValueError, match=r"^loss has shape \(12,\)"):
        ol.train_step(model, nn.CrossEntropyLoss(reduction="none"), optimizer, compile=False)(x, y)
    with pytest.raises(
        ValueError, match=r"^step has 4 arguments: all but the last go to the model, .*pass several targets"
    ):
        ol.train_step(model, F.cross_entropy, optimizer, compile=False)(x, y, y, y)
    lists = Lists()
    with pytest.raises(ValueError, match=r"^loss=None, but the model returned a list without a loss"):
        ol.train_step(lists, None, torch.optim.SGD(lists.parameters()), compile=False)(x)
    with pytest.raises(ValueError, match=r"^loss is a float"):
        ol.train_step(model, lambda output, target: 1.0, optimizer, compile=False)(x, y)  # type: ignore[return-value]


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(without: Callable[[], Any]) -> None:
    model = network()
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    (x, y), *_ = batches(1)
    with (
        without(),
        pytest.raises(ol.OnelaunchError, match=r"^step needs gradients, but was called under .*: call it outside$"),
    ):
        step(x, y)
    assert torch.isfinite(step(x, y))
    step = ol.train_step(
        model, lambda output, target: output.detach().sum(), torch.optim.SGD(model.parameters()), compile=False
    )
    with pytest.raises(
        ol.OnelaunchError, match=r"^loss depends on no parameter that requires gradients: do not detach it"
    ):
        step(x, y)


class Wrapped(nn.Linear):
    """Returns its output in something else than a tensor."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(8, 4)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(super().forward(x))


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda y: (y, y), r"the model returned a tuple, and loss raised .*loss=lambda .*\(output\[0\], target\)"),
        (lambda y: {"scores": y}, r"the model returned a dict, and loss raised .*\(output\['scores'\], target\)"),
        (lambda y: None, r"the model returned None, which has no loss: return its output from forward"),
    ],
    ids=["tuple", "dict", "None"],
)
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()], ids=["cross_entropy", "mse"])
def test_an_output_that_is_not_a_tensor_in_one_line(wrap: Any, message: str, loss: nn.Module) -> None:
    model = Wrapped(wrap)
    step = ol.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    (x, y), *_ = batches(1)
    with pytest.raises(ol.OnelaunchError, match=f"^{message}[^\n]*$"):
        step(x, y)


WRONG = {
    "width": (
        lambda x, y: (x[:, :5], y),
        r"step\(float32\[12, 5\], int64\[12\]\) is not possible: mat1 and mat2 shapes",
    ),
    "dtype": (lambda x, y: (x, y.float()), r"step\(float32\[12, 8\], float32\[12\]\) is not possible: expected .*type"),
    "rows": (
        lambda x, y: (x, y[:5]),
        r"step\(float32\[12, 8\], int64\[5\]\) is not possible: Expected input batch_size",
    ),
    "label": (lambda x, y: (x, y + 4), r"step\(.*\) is not possible: Target \d is out of bounds: check these shapes"),
    "batch": (
        lambda x, y: ((x, y),),
        r"step has no target: pass the parts of a batch one by one, as in step\(\*batch\)",
    ),
    "lists": (lambda x, y: (x.tolist(), y.tolist()), r"step\(list, list\) has no tensors: pass tensors, as in"),
}


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_of_a_step_in_one_line(name: str, compile: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, (made, message) = network(), WRONG[name]
    step = ol.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), compile=compile)
    (x, y), *_ = batches(1)
    with pytest.raises(ol.OnelaunchError, match=f"^{message}[^\n]*$"):
        step(*made(x, y))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert torch.isfinite(step(x, y))


@pytest.mark.parametrize("compile", [True, False])
def test_names_of_a_step_in_one_line(compile: bool) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            if mask is not None:
                raise RuntimeError("own words")
            return self.layer(x)

    model = Masked()
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), compile=compile)
    (x, y), *_ = batches(1)
    with pytest.raises(
        TypeError, match=r"^step has no argument 'target'[^\n]*; the target is the last argument, without a name$"
    ):
        step(x, target=y)
    with pytest.raises(ol.OnelaunchError, match=r"[^\n]*forward has no argument 'msk'; did you mean 'mask'\?$"):
        step({"x": x, "msk": x}, y)
    with pytest.raises(RuntimeError, match=r"^own words$"):  # the model's own exception keeps its type
        step(x, x, y)
    assert torch.isfinite(step(x, y))


def test_arrays_among_the_inputs_of_a_step() -> None:
    """Compiled, Dynamo takes them for tensors."""
    model = network()
    step = ol.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    (x, y), *_ = batches(1)
    message = r"^step\(float32\[12, 8\], ndarray int64\[12\]\) is not possible: .*, and pass tensors instead of arrays$"
    with pytest.raises(ol.OnelaunchError, match=message):
        step(x, y.numpy())


class Lists(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        return [x]


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(x["x"])


@pytest.mark.parametrize("compile", [True, False])
def test_a_dict_that_was_passed_by_name_is_said_to_be(compile: bool) -> None:
    model = TakesDict()
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), compile=compile)
    (x, y), *_ = batches(1)
    said = r"; the dict was passed by name, as its keys are arguments of forward"
    with pytest.raises(ol.OnelaunchError, match=rf"^step\({{x: float32\[12, 8\]}}, int64\[12\]\) is not [^\n]*{said}$"):
        step({"x": x}, y)
    with pytest.raises(ol.OnelaunchError, match=r"is not possible: Target \d is out of bounds[^\n;]*$"):
        step({"x": {"x": x}}, y + 4)


def test_what_cannot_be_trained() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ol.OnelaunchError, match=r"^model=ReLU has no parameters"):
        ol.train_step(nn.ReLU(), F.cross_entropy, optimizer)
    with pytest.raises(ol.OnelaunchError, match=r"^autocast=torch.float32 is not known: pass 'bf16'"):
        ol.train_step(model, F.cross_entropy, optimizer, autocast=torch.float32)
    with pytest.raises(ol.OnelaunchError, match=r"^loss has shape \(12, 4\): pass loss=, such as"):
        ol.train_step(model, None, optimizer, compile=False)(batches(1)[0][0])
