"""Early stopping: when a run ends, which weights it keeps, and that a resumed run decides as one that was never stopped."""

from __future__ import annotations

import math
import multiprocessing
import shutil
import time

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.run.early_stopping import BestEpoch
from onelaunch.train.checkpoint import load_checkpoint, save_checkpoint
from tests.reference import problem
from tests.train.checkpointed import same

pytestmark = pytest.mark.usefixtures("one_thread")


def network(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(64)] if norm else []
    return nn.Sequential(nn.Linear(7, 64), *norms, nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))


def noisy() -> tuple[torch.Tensor, torch.Tensor]:
    """Few rows with many wrong labels: a network soon learns them by heart."""
    torch.manual_seed(1)
    x, y = problem("cross_entropy", 120)
    return x, torch.where(torch.rand(120) < 0.4, torch.randint(4, (120,)), y)


def run(model: nn.Module, engine: str = "cpu", **options):
    x, y = noisy()
    defaults = {
        "epochs": 60, "lr": 2e-2, "batch_size": 28, "validation": 0.3, "early_stopping": 4, "engine": engine,
        "progress": False,
    }  # fmt: skip
    return ol.fit(model, x, y, **{**defaults, **options})


def validation_losses(history: ol.History) -> list[float]:
    return [epoch["validation"]["loss"] for epoch in history.epochs]


@pytest.mark.parametrize("engine", ["eager", "cpu", pytest.param("graph", marks=pytest.mark.gpu)])
def test_ends_after_patience_epochs_with_the_weights_of_the_best(engine):
    norm, device = (False, "cuda") if engine == "graph" else (True, "cpu")  # graph has no batch norm
    model = network(norm).to(device)
    history = run(model, engine)
    losses = validation_losses(history)
    best = losses.index(min(losses))
    assert history.best_epoch == best
    assert len(losses) == best + 1 + 4 < 60
    twin = network(norm).to(device)
    run(twin, engine, epochs=best + 1, early_stopping=None)
    assert same(model, twin)


def test_the_last_weights_stay_without_restore_best():
    model, twin = network(), network()
    history = run(model, early_stopping=ol.EarlyStopping(4, restore_best=False))
    run(twin, epochs=len(history.epochs), early_stopping=None)
    assert same(model, twin)


def test_a_run_that_reaches_its_end_keeps_the_best_too():
    model, twin = network(), network()
    history = run(model, epochs=10, early_stopping=50)
    assert len(history.epochs) == 10
    run(twin, epochs=history.best_epoch + 1, early_stopping=None)
    assert same(model, twin)


@pytest.mark.parametrize("metric", ["accuracy", "f1", "log_loss"])
def test_follows_other_metrics(metric):
    history = run(network(), early_stopping=ol.EarlyStopping(2, metric))
    values = [epoch["validation"][metric] for epoch in history.epochs]
    chosen = min(values) if metric == "log_loss" else max(values)
    assert history.best_epoch == values.index(chosen)
    assert len(values) == history.best_epoch + 3


def test_small_gains_do_not_count():
    rule = BestEpoch(ol.EarlyStopping(patience=2, metric="accuracy", min_delta=0.1))
    assert [rule.improves(epoch, value) for epoch, value in enumerate((0.5, 0.55, 0.7, 0.75, math.nan))] == [
        True, False, True, False, False,
    ]  # fmt: skip
    assert rule.stopped
    assert (rule.epoch, rule.value) == (2, 0.7)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"patience": 0}, r"patience=0 must be 1 or more"),
        ({"patience": 1.5}, r"patience=1.5 is not an integer"),
        ({"metric": "val_loss"}, r"metric='val_loss' is not known.*'loss', which is what 'val_loss' is called here"),
        ({"min_delta": -1}, r"min_delta=-1 must be"),
        ({"min_delta": "a"}, r"min_delta='a' is not a number"),
        ({"restore_best": 1}, r"restore_best=1 must be True or False"),
    ],
)
def test_bad_rules_get_one_line(rule, message):
    with pytest.raises(ValueError, match=message) as caught:
        ol.EarlyStopping(**rule)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ["eager", "cpu"])
def test_resumes_to_the_same_bits_wherever_it_was_cut(engine, tmp_path):
    weights = torch.rand(120)
    options = {"sample_weight": weights, "clip_norm": 0.5, "class_weight": "balanced", "metrics": ("f1",)}
    whole = network()
    expected = run(whole, engine, **options)
    for epochs in (expected.best_epoch + 2, len(expected.epochs)):
        path = tmp_path / f"{epochs}.safetensors"
        run(network(), engine, epochs=epochs, checkpoint=path, **options)
        model = network()
        history = run(model, engine, checkpoint=path, resume=True, **options)
        assert history.losses == expected.losses
        assert validation_losses(history) == validation_losses(expected)
        assert history.best_epoch == expected.best_epoch
        assert same(model, whole)
        again = network()
        assert run(again, engine, checkpoint=path, resume=True, **options).losses == expected.losses  # nothing is left
        assert same(again, whole)


def _train_for_long(path) -> None:
    torch.set_num_threads(1)
    run(network(), epochs=100_000, early_stopping=60_000, checkpoint=path, clip_norm=0.5)


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    path = tmp_path / "run.safetensors"
    process = multiprocessing.get_context("spawn").Process(target=_train_for_long, args=(path,))
    process.start()
    try:
        deadline = time.monotonic() + 120
        while not path.exists() or not load_checkpoint(path).losses.numel():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.join()
    options = {"epochs": len(load_checkpoint(path).about["epochs"]) + 20, "clip_norm": 0.5, "early_stopping": 60_000}
    model, whole = network(), network()
    history = run(model, checkpoint=path, resume=True, **options)
    assert history.losses == run(whole, **options).losses
    assert same(model, whole)


def test_the_rule_is_part_of_the_run(tmp_path):
    path = tmp_path / "run.safetensors"
    run(network(), epochs=2, checkpoint=path)
    with pytest.raises(ol.CheckpointError, match=r"made with early_stopping=.*'patience': 4"):
        run(network(), checkpoint=path, resume=True, early_stopping=ol.EarlyStopping(4, "accuracy"))


def test_a_stopped_run_says_so_and_goes_on_with_more_patience_or_none(tmp_path, caplog):
    path, copy = tmp_path / "run.safetensors", tmp_path / "copy.safetensors"
    ended = len(run(network(), early_stopping=2, checkpoint=path).epochs)
    shutil.copyfile(path, copy)
    assert len(run(network(), early_stopping=2, checkpoint=path, resume=True).epochs) == ended
    assert f"early_stopping=2 ended this run after epoch {ended}: pass a larger one, or None" in caplog.text
    model, whole = network(), network()
    history = run(model, early_stopping=6, checkpoint=path, resume=True)
    assert validation_losses(history) == validation_losses(run(whole, early_stopping=6))
    assert len(history.epochs) > ended
    assert same(model, whole)
    model, whole = network(), network()
    run(model, epochs=ended + 3, early_stopping=None, checkpoint=copy, resume=True)
    run(whole, epochs=ended + 3, early_stopping=None)
    assert same(model, whole)


def test_the_figure_marks_the_epoch_that_is_kept(tmp_path) -> None:
    epochs = [
        {"epoch": n, "step": 10 * (n + 1), "loss": 1.0 - 0.1 * n, "accuracy": 0.5 + 0.1 * n,
         "validation": {"loss": 1.0, "accuracy": accuracy}}
        for n, accuracy in enumerate((0.6, 0.75, 0.7))
    ]  # fmt: skip
    history = ol.History(engine="cpu", losses=[1.0] * 30, epochs=epochs, best_epoch=1)
    text = history.plot(tmp_path / "kept.svg").read_text()
    assert "best epoch" in text
    assert "75.00 % in epoch 2" in text
    history.best_epoch = None
    text = history.plot(tmp_path / "last.svg").read_text()
    assert "best epoch" not in text
    assert "70.00 % at the end" in text


def test_the_validation_rows_are_part_of_a_run_that_follows_them(tmp_path):
    path = tmp_path / "run.safetensors"
    x, y = noisy()
    run(network(), epochs=2, checkpoint=path, validation=(x, y))
    before = path.read_bytes()
    for other in ((x + 1, y), (x, y.flip(0)), (x[:60], y[:60])):
        with pytest.raises(
            ol.CheckpointError, match=r"made with other validation rows.*: pass the validation"
        ) as caught:
            run(network(), checkpoint=path, resume=True, validation=other)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    old = load_checkpoint(path)
    del old.about["validation"]  # as older versions wrote it
    save_checkpoint(path, old)
    assert run(network(), epochs=3, checkpoint=path, resume=True, validation=(x + 1, y)).losses
    with pytest.raises(ol.CheckpointError, match="other validation rows"):  # the resumed run has noted its rows
        run(network(), epochs=3, checkpoint=path, resume=True, validation=(x, y))


def test_a_run_that_is_only_watched_may_have_other_validation_rows(tmp_path):
    path = tmp_path / "run.safetensors"
    x, y = noisy()
    run(network(), epochs=2, checkpoint=path, validation=(x, y), early_stopping=None)
    model, whole = network(), network()
    run(model, epochs=4, checkpoint=path, resume=True, validation=(x + 1, y), early_stopping=None)
    run(whole, epochs=4, validation=(x, y), early_stopping=None)
    assert same(model, whole)
