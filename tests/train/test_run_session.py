"""Callbacks that change the model: the run goes on with the change, on every engine as on the eager one."""

from __future__ import annotations

import logging
import signal

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.engines.cpu import CpuEngine
from onelaunch.rng import permutation
from onelaunch.train.checkpoint import load_checkpoint
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import OPTIMIZERS, assert_same_course, assert_same_weights
from tests.train.acting_callbacks import CHANGES, at_epoch, data, drop_more, freeze, halve, halve_data, network, run

pytestmark = pytest.mark.usefixtures("one_thread")
REPLACED = {"another_layer", "another_parameter", "wider"}


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("optimizer", ["adam", "sgd-nesterov", "rmsprop"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_counts_from_the_next_step_on_as_on_eager(name, optimizer):
    change, options = CHANGES[name], OPTIMIZERS[optimizer]
    reference, plain, model = network(), network(), network()
    expected = run(reference, at_epoch(2, change, reference), engine="eager", **options)
    unchanged = run(plain, lambda history: None, engine="cpu", **options)
    assert max(abs(a - b) for a, b in zip(expected.losses[10:], unchanged.losses[10:], strict=True)) > 1e-3
    got = run(model, at_epoch(2, change, model), **options)
    assert_same_course(got.losses, expected.losses, LOSS_TOLERANCE)
    assert_same_weights(model, reference, WEIGHT_TOLERANCE)
    leaves = name in ("freeze", "hook") or (name in REPLACED and optimizer == "adam")
    assert got.engine == ("eager" if leaves else "cpu")
    assert ("cpu until a callback changed" in got.reason) == leaves


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["graph", "resident", "compiled"])
@pytest.mark.parametrize("name", ["halve", "halve_data", "zero_in_other_memory", "freeze", "drop_more", "wider"])
def test_a_change_counts_on_a_gpu(name, engine):
    reference, model = network("cuda"), network("cuda")
    for each in (reference, model):  # `resident` has no LayerNorm
        each[4] = nn.Identity()
    options = {"precision": "fp32"}
    expected = run(reference, at_epoch(2, CHANGES[name], reference), engine="eager", **options)
    if name == "freeze" and engine != "compiled":
        with pytest.raises(ol.UnsupportedError, match=r"changed requires_grad of 0\.weight.*frozen"):
            run(model, at_epoch(2, freeze, model), engine=engine, **options)
        model = network("cuda")
        model[4] = nn.Identity()
        engine = "auto"
    got = run(model, at_epoch(2, CHANGES[name], model), engine=engine, **options)
    assert_same_course(got.losses, expected.losses, LOSS_TOLERANCE)
    assert_same_weights(model, reference, WEIGHT_TOLERANCE)


@pytest.mark.parametrize("engine", ["cpu", "eager"])
def test_a_change_in_every_epoch_and_one_after_the_last_epoch_stay(engine):
    reference, model, last = network(), network(), network()
    expected = run(reference, lambda history: halve(reference), engine="eager")
    assert_same_course(run(model, lambda history: halve(model), engine=engine).losses, expected.losses, LOSS_TOLERANCE)
    assert_same_weights(model, reference, WEIGHT_TOLERANCE)
    run(last, at_epoch(5, lambda model: model[3].weight.data.fill_(7.0), last), engine=engine)
    assert torch.equal(last[3].weight, torch.full((8, 16), 7.0))


def test_a_callback_that_only_reads_changes_no_bit_and_starts_no_session(monkeypatch):
    started: list[CpuEngine] = []
    start = CpuEngine.start

    def counted(engine, *arguments):
        started.append(engine)
        return start(engine, *arguments)

    monkeypatch.setattr(CpuEngine, "start", counted)
    alone, read = network(), network()

    def reads(history):
        read.eval()
        with torch.no_grad():
            read(data()[0])

    expected, got = run(alone, engine="cpu"), run(read, reads, engine="cpu")
    assert got.losses == expected.losses
    assert same(read, alone)
    assert len(started) == 2
    assert all(module.training for module in read.modules())


def test_the_log_names_the_change_and_the_other_engine(caplog):
    model = network()
    with caplog.at_level(logging.WARNING, "onelaunch"):
        history = run(model, at_epoch(2, freeze, model))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("after epoch 2 a callback changed requires_grad of 0.weight: the run goes on with eager, ")
    assert "cpu: 0.weight is frozen (requires_grad=False)" in history.reason


def test_a_frozen_layer_keeps_its_values():
    model, kept = network(), []

    def stop(model):
        model[0].requires_grad_(False)
        kept.append(model[0].weight.detach().clone())

    run(model, at_epoch(2, stop, model), optimizer="adamw", weight_decay=0.1)
    assert torch.equal(model[0].weight, kept[0])


def plain_losses(model: nn.Sequential, options: dict, unfrozen_at: int) -> list[float]:
    """The losses of PyTorch with one optimizer over all parameters, of which the first layer trains from an epoch on."""
    x, y = data()
    optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[options["optimizer"]](
        model.parameters(), **{name: value for name, value in options.items() if name != "optimizer"}
    )
    losses = []
    for epoch in range(5):
        model[0].requires_grad_(epoch >= unfrozen_at)
        for rows in permutation(len(x), 0, epoch).split(32):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("engine", ["auto", "eager"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd-nesterov"])
def test_an_unfrozen_layer_trains_as_in_plain_pytorch(engine, optimizer):
    model, other = network(), network()
    for each in (model, other):
        each[2].p = 0.0
        each[0].requires_grad_(False)
    options = OPTIMIZERS[optimizer]
    expected = plain_losses(other, options, unfrozen_at=2)
    got = run(model, at_epoch(2, lambda model: model[0].requires_grad_(True), model), engine=engine, **options)
    assert_same_course(got.losses, expected, LOSS_TOLERANCE)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)
    # With Adam the layer has its own number of updates, which a native engine does not count.
    assert got.engine == ("cpu" if engine == "auto" and optimizer != "adam" else "eager")


@pytest.mark.parametrize("optimizer", ["adam", "sgd-nesterov"])
def test_a_layer_that_is_frozen_now_and_then_keeps_its_optimizer_state(optimizer):
    reference, model = network(), network()

    def turns(model):
        return lambda history: model[0].requires_grad_(len(history.epochs) % 2 == 0)

    expected = run(reference, turns(reference), engine="eager", **OPTIMIZERS[optimizer])
    got = run(model, turns(model), **OPTIMIZERS[optimizer])
    assert_same_course(got.losses, expected.losses, LOSS_TOLERANCE)
    assert_same_weights(model, reference, WEIGHT_TOLERANCE)


MISTAKES = {
    "all layers frozen": (lambda model: model.requires_grad_(False), "no parameter to train"),
    "other outputs": (lambda model: model.append(nn.Linear(4, 3)), "3 outputs now, and had 4"),
    "other inputs": (lambda model: model.insert(0, nn.Linear(5, 7)), "x has 7 values per row"),
    "on another device": (lambda model: model.to("meta"), "meta device"),
    "a frozen layer": (freeze, r"engine='cpu' cannot run this: 0\.weight is frozen .*; pass engine='auto'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_model_that_the_run_cannot_go_on_with_gets_one_line(name):
    change, message = MISTAKES[name]
    model = network()
    with pytest.raises(ol.OnelaunchError, match=f"after epoch 2 a callback changed .*{message}") as caught:
        run(model, at_epoch(2, change, model), engine="cpu")
    assert isinstance(caught.value, ol.UnsupportedError) == (name == "a frozen layer")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ["cpu", "eager"])
def test_what_callbacks_did_before_an_error_stays(engine):
    model = network()

    def fail(history):
        model[3].weight.data.fill_(7.0)
        raise RuntimeError("of the callback")

    with pytest.raises(RuntimeError, match="of the callback"):
        run(model, fail, engine=engine)
    assert torch.equal(model[3].weight, torch.full((8, 16), 7.0))


@pytest.mark.parametrize("optimizer", ["adam", "sgd-nesterov"])
@pytest.mark.parametrize("change", [halve_data, drop_more, freeze])
@pytest.mark.parametrize("engine", ["auto", "eager"])
def test_resumes_to_the_same_bits_from_the_epoch_of_the_change(tmp_path, engine, change, optimizer):
    path, options = tmp_path / "run.safetensors", {"engine": engine, **OPTIMIZERS[optimizer]}
    whole, first, resumed = network(), network(), network()
    expected = run(whole, at_epoch(2, change, whole), **options)
    run(first, at_epoch(2, change, first), epochs=2, checkpoint=path, **options)
    if change is not halve_data:  # what a checkpoint compares and does not set
        with pytest.raises(ol.CheckpointError, match=r"frozen|p=0\.9"):
            run(resumed, checkpoint=path, resume=True, **options)
        change(resumed)
    history = run(resumed, checkpoint=path, resume=True, **options)
    assert history.losses == expected.losses
    assert same(resumed, whole)
    assert history.engine == expected.engine


def test_ctrl_c_saves_what_the_callback_has_done(tmp_path):
    path = tmp_path / "run.safetensors"
    whole, stopped, resumed = network(), network(), network()
    expected = run(whole, at_epoch(2, halve_data, whole), engine="cpu")

    def change_and_stop(model):
        halve_data(model)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(stopped, at_epoch(2, change_and_stop, stopped), engine="cpu", checkpoint=path)
    saved = load_checkpoint(path)
    assert saved.step == 10
    assert all(torch.equal(saved.model[name], tensor) for name, tensor in stopped.state_dict().items())
    history = run(resumed, engine="cpu", checkpoint=path, resume=True)
    assert history.losses == expected.losses
    assert same(resumed, whole)


def test_early_stopping_sees_the_same_epochs_as_on_eager():
    reference, model = network(), network()
    options = {"epochs": 12, "early_stopping": 3}
    spoil = lambda model: model[6].weight.data.mul_(30.0)  # noqa: E731
    expected = run(reference, at_epoch(4, spoil, reference), engine="eager", **options)
    got = run(model, at_epoch(4, spoil, model), engine="cpu", **options)
    assert got.best_epoch == expected.best_epoch == 3
    assert len(got.epochs) == len(expected.epochs)
    assert_same_weights(model, reference, WEIGHT_TOLERANCE)


class Chosen(nn.Module):
    """An MLP whose forward reads a number from an object."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.settings = nn.Linear(7, 16), nn.Linear(16, 4), {"p": 0.1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(torch.relu(self.first(x)), self.settings["p"], self.training)
        return self.second(h)


def test_a_change_of_what_forward_reads_counts():
    reference, model = Chosen(), Chosen()

    def drop_more_in(model):
        return lambda history: model.settings.update(p=0.7 if len(history.epochs) >= 2 else 0.1)

    expected = run(reference, drop_more_in(reference), engine="eager")
    got = run(model, drop_more_in(model), engine="cpu")
    assert_same_course(got.losses, expected.losses, LOSS_TOLERANCE)
