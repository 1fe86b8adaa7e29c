"""`ol.train_step` against a plain loop: on a CPU operation by operation, on a GPU as recorded graphs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.capture import clear_workspaces
from onelaunch.fuse import backend
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import assert_same_course, assert_same_weights

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def patched(no_code: None) -> None:
    """Without code generation."""
    torch.manual_seed(0)


def network(device: str = "cpu", dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4)).to(device)


def batches(count: int, device: str = "cpu", rows: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(rows, 8, device=device), torch.randint(4, (rows,), device=device)) for _ in range(count)]


def plain_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any], *, clip: float | None = None, every: int = 1,
    scheduler: Any = None, loss: Any = F.cross_entropy,
) -> list[float]:  # fmt: skip
    losses = []
    for number, (x, y) in enumerate(data, 1):
        value = loss(model(x), y)
        (value / every).backward()
        losses.append(value.item())
        if number % every == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return losses


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_loop_gives_the_same(name: str, device: str) -> None:
    model, data = network(device), batches(30, device)
    other = copy.deepcopy(model)
    step = ol.train_step(model, F.cross_entropy, OPTIMIZERS[name](model.parameters()), clip_norm=0.5)
    losses = [float(step(x, y)) for x, y in data]
    expected = plain_losses(other, OPTIMIZERS[name](other.parameters()), data, clip=0.5)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)
    assert bool(step.reason) == (device == "cpu")
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_accumulation_and_a_scheduler(device: str) -> None:
    model, data = network(device), batches(24, device)
    other = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.2) for one in (model, other)]
    mine, theirs = (torch.optim.lr_scheduler.StepLR(one, 2, 0.7) for one in optimizers)
    step = ol.train_step(model, nn.CrossEntropyLoss(), optimizers[0], accumulate=3)
    losses = []
    for number, (x, y) in enumerate(data, 1):
        losses.append(float(step(x, y)))
        if number % 3 == 0:
            mine.step()
    expected = plain_losses(other, optimizers[1], data, every=3, scheduler=theirs)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)


class OwnLoss(nn.Module):
    """Returns a dict with its loss, as `transformers` do; inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_models_with_their_own_loss_and_inputs_by_name(device: str) -> None:
    model, data = OwnLoss().to(device), batches(6, device)
    other = copy.deepcopy(model)
    step = ol.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    calls = [lambda x, y: step({"inputs": x, "labels": y}), lambda x, y: step(inputs=x, labels=y), step]
    losses = [float(calls[number % 3](x, y)) for number, (x, y) in enumerate(data)]
    expected = plain_losses(nn.Sequential(other.layer), torch.optim.SGD(other.parameters(), lr=0.1), data)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_bf16_autocast(device: str) -> None:
    model, data = network(device), batches(10, device)
    other = copy.deepcopy(model)
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), autocast="bf16")
    losses = [float(step(x, y)) for x, y in data]
    assert_same_course(losses, plain_losses(other, torch.optim.SGD(other.parameters(), lr=0.1), data), 0.02)


def test_a_fused_model_uncompiled_and_a_group_added_later() -> None:
    model, data = network(), batches(4)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    step = ol.train_step(ol.fuse(model), F.cross_entropy, optimizer, clip_norm=1e-9, compile=False)
    step(*data[0])
    optimizer.add_param_group({"params": list(model[3].parameters())})
    before = copy.deepcopy(model)
    model.zero_grad()
    step(*data[1])
    assert_same_weights(model, before, 1e-8)  # the new group is clipped too


def test_numbers_of_numpy_and_names_of_types() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        step = ol.train_step(
            model, None, optimizer, clip_norm=np.float32(0.5), autocast=name, capture=False, compile=False
        )
        assert (step.clip_norm, step.autocast) == (0.5, dtype)
        assert type(step.clip_norm) is float


def test_many_steps_do_not_share_dynamos_limit() -> None:
    """Each model is compiled: with one code object for all, Dynamo stops after 8."""
    for width in range(2, 13):
        model = nn.Linear(8, width)
        step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
        step(torch.randn(3, 8), torch.zeros(3, dtype=torch.int64))
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 11


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
    for clip_norm in (0, -1.0, "1", True, float("nan")):
        with pytest.raises(ValueError, match=r"^clip_norm=.* must be a number above 0"):
            ol.train_step(model, None, optimizer, clip_norm=clip_norm)
    for switch in ("capture", "compile"):
        with pytest.raises(TypeError, match=rf"^{switch}='no' must be True or False$"):
            ol.train_step(model, None, optimizer, **{switch: "no"})  # type: ignore[arg-type]
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


def test_compiling_for_a_cpu_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model, data = network(), batches(2)
    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, *others: gm.forward)
    for options in ({}, {"compile": False}):
        step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        for x, y in data:
            step(x, y)
    messages = [record.getMessage() for record in caplog.records if record.name == "onelaunch"]
    assert len(messages) == 1
    assert messages[0].startswith("train_step: compiling the step for the CPU with the C++ compiler takes seconds")
    assert messages[0].endswith("compile=False starts at once")


def test_a_partial_batch_on_a_cpu_compiles_nothing() -> None:
    model = network()
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    for rows in (12, 5, 7):
        step(*batches(1, rows=rows)[0])
    assert stats["unique_graphs"] == before + 1


class Lists(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        return [x]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_begins_without_gradients_and_leaves_those_of_others(device: str, accumulate: int) -> None:
    """A GAN: the generator's step goes through the critic, whose gradients it neither changes nor uses."""

    def train(alternately: Callable[[nn.Module, nn.Module, nn.Module], Any]) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        generator, critic = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        alternately(generator.to(device), critic.to(device), nn.Sequential(generator, critic))
        return generator, critic

    data = [
        torch.randn(6, 12, 8, device=device) for _ in range(8)
    ]  # of each round: two batches for each of three arguments

    def ours(generator: nn.Module, critic: nn.Module, both: nn.Module) -> None:
        critical, generating = (
            ol.train_step(model, nn.MSELoss(), torch.optim.SGD(owner.parameters(), lr=0.5), accumulate=accumulate)
            for model, owner in ((critic, critic), (both, generator))
        )
        for x, y, z, *others in data:
            critic.zero_grad(set_to_none=False)
            for _ in range(accumulate):
                generating(z, y)
            assert not any(one.grad.any() for one in critic.parameters() if one.grad is not None)
            critic(x).sum().backward()
            for batch in (x, others[0])[:accumulate]:
                critical(batch, y)

    def theirs(generator: nn.Module, critic: nn.Module, both: nn.Module) -> None:
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (critic, generator)]
        for x, y, z, *others in data:
            for model, optimizer, batches in ((both, optimizers[1], (z, z)), (critic, optimizers[0], (x, others[0]))):
                optimizer.zero_grad()
                for batch in batches[:accumulate]:
                    (F.mse_loss(model(batch), y) / accumulate).backward()
                optimizer.step()

    for one, other in zip(train(ours), train(theirs), strict=True):
        assert_same_weights(one, other, WEIGHT_TOLERANCE * 10)


# Recorded graphs.


@pytest.mark.gpu
def test_dropout_advances_and_repeats_under_a_seed() -> None:
    def run() -> list[float]:
        torch.manual_seed(3)
        model = network("cuda", 0.5)
        step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.0))
        (x, y), *_ = batches(1, "cuda")
        return [float(step(x, y)) for _ in range(8)]

    first = run()
    assert len(set(first)) == 8
    assert run() == first


@pytest.mark.gpu
def test_a_partial_batch_has_its_own_graph_and_loaded_state_is_read() -> None:
    model, data = network("cuda"), [*batches(5, "cuda"), *batches(5, "cuda", 7)] * 2
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.Adam(one.parameters(), lr=1e-2) for one in (model, other))
    step = ol.train_step(model, F.cross_entropy, optimizer)
    losses = [float(step(x, y)) for x, y in data]
    assert len(step._recorded) == 2
    expected = plain_losses(other, theirs, data)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    losses += [float(step(x, y)) for x, y in data]
    expected += plain_losses(other, theirs, data)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)


@pytest.mark.gpu
def test_fp16_with_a_scaler() -> None:
    model, data = network("cuda"), batches(12, "cuda")
    other = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = ol.train_step(model, F.cross_entropy, optimizer, autocast="fp16", scaler=scaler, clip_norm=1.0)
    losses = [float(step(x, y)) for x, y in data]
    assert step.reason == ""
    expected = plain_losses(other, torch.optim.Adam(other.parameters(), lr=1e-2), data, clip=1.0)
    assert_same_course(losses, expected, 0.02)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.layer(x))
        return y * 2 if y.sum().item() > 0 else y


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo's own, in PyTorch 2.11
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_that_cannot_be_recorded(accumulate: int, caplog: pytest.LogCaptureFixture) -> None:
    model, data = Reads().cuda(), batches(10, "cuda")
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ol.train_step(model, F.cross_entropy, optimizer, accumulate=accumulate)
    with caplog.at_level(logging.WARNING, "onelaunch"):
        losses = [float(step(x, y)) for x, y in data]
    assert step.reason
    assert sum("operation by operation" in record.getMessage() for record in caplog.records) == 1
    expected = plain_losses(other, torch.optim.SGD(other.parameters(), lr=0.1), data, every=accumulate)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)


@pytest.mark.gpu
def test_an_exception_between_replays() -> None:
    model, data = network("cuda"), batches(10, "cuda")
    other = copy.deepcopy(model)
    step = ol.train_step(model, F.cross_entropy, torch.optim.Adam(model.parameters()))
    losses = []
    for number, (x, y) in enumerate(data):
        if number in (1, 5):
            with pytest.raises(Exception):  # noqa: B017
                step(x[:, :3], y)
        losses.append(float(step(x, y)))
    assert_same_course(losses, plain_losses(other, torch.optim.Adam(other.parameters()), data), LOSS_TOLERANCE * 10)


@pytest.mark.gpu
def test_a_step_holds_one_workspace_of_the_matrix_library() -> None:
    """The backward pass runs in a thread with a workspace of its own: 32 MiB more, more than the whole of a small network."""
    model, (data, *_) = network("cuda"), batches(1, "cuda")
    clear_workspaces()
    before = torch.cuda.memory_allocated()
    square = torch.ones(64, 64, device="cuda")
    square = square @ square
    workspace = torch.cuda.memory_allocated() - before
    clear_workspaces()
    step = ol.train_step(model, F.cross_entropy, torch.optim.Adam(model.parameters()))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        step(*data)
    assert step.reason == ""
    assert torch.cuda.max_memory_allocated() - before < 1.5 * workspace
