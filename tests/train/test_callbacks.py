"""Callbacks, the two loggers, the History as a table, and what is printed without a terminal."""

from __future__ import annotations

import csv
import importlib.util
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.train.progress import LineProgress
from tests.reference import problem

pytestmark = pytest.mark.usefixtures("one_thread")


def run(callbacks=(), **options):
    torch.manual_seed(0)
    x, y = problem("cross_entropy")
    defaults = {"epochs": 3, "validation": 0.2, "metrics": ("f1",), "engine": "eager", "progress": False}
    return ol.fit(nn.Linear(7, 4), x, y, callbacks=callbacks, **{**defaults, **options})


def test_are_called_after_each_epoch_with_the_history():
    seen: list[tuple[int, float]] = []
    run([lambda history: seen.append((len(history.epochs), history.epochs[-1]["validation"]["f1"])), lambda _: None])
    assert [count for count, _ in seen] == [1, 2, 3]


def test_an_exception_ends_the_run_and_leaves_the_model_usable():
    class Enough(Exception):
        pass

    def stop(history: ol.History) -> None:
        raise Enough

    x, y = problem("cross_entropy")
    model = nn.Sequential(nn.Linear(7, 4))
    for engine in ("eager", "cpu"):
        with pytest.raises(Enough):
            ol.fit(model, x, y, epochs=3, callbacks=[stop], engine=engine, progress=False)
        assert torch.isfinite(model(x)).all()


def test_the_csv_logger_and_the_pandas_frame_agree(tmp_path):
    path = tmp_path / "logs" / "run.csv"
    checkpoint = tmp_path / "run.safetensors"
    run([ol.CsvLogger(path)], epochs=2, checkpoint=checkpoint)
    history = run([ol.CsvLogger(path)], checkpoint=checkpoint, resume=True)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    frame = history.to_pandas()
    assert list(rows[0]) == list(frame.columns)
    columns = {"epoch", "step", "loss", "accuracy", "lr", "seconds", "validation_loss", "validation_accuracy"}
    assert set(rows[0]) == columns | {"validation_f1"}
    assert [float(row["loss"]) for row in rows] == frame["loss"].tolist()
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2]


def test_a_csv_file_that_cannot_be_written_gets_one_line(tmp_path):
    with pytest.raises(ol.OnelaunchError, match="cannot be written"):
        run([ol.CsvLogger(tmp_path)])
    with pytest.raises(ol.OnelaunchError, match="path=3 is not a path"):
        ol.CsvLogger(3)


def test_the_tensorboard_logger_writes_or_says_what_is_missing(tmp_path):
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(ol.OnelaunchError, match="pip install tensorboard"):
            ol.TensorBoardLogger(tmp_path)
        return
    run([ol.TensorBoardLogger(tmp_path)])
    assert list(tmp_path.glob("events.out.tfevents*"))


def test_without_a_terminal_each_epoch_is_one_line(capfd):
    run(progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("epoch 1/3  loss ")
    assert ", validation " in lines[0]
    assert ", f1 0." in lines[0]
    run()
    assert capfd.readouterr().err == ""


def test_the_line_of_an_epoch_fits_into_80_columns():
    out, validation = io.StringIO(), {"loss": 0.57113, "accuracy": 0.975}
    progress = LineProgress(out)
    spec = SimpleNamespace(total_steps=1000, epoch_of=lambda step: step // 10)
    with progress.running(spec, None, 3):
        progress.epoch({"epoch": 99, "loss": 0.56563, "accuracy": 0.98125, "validation": validation, "seconds": 12.34})
    line = "epoch 100/100  loss 0.5656, accuracy 98.12 %, validation 0.5711, 97.50 %  12.3 s\n"
    assert out.getvalue() == line
    assert len(line) <= 81  # with the end of the line
