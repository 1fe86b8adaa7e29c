"""The history of a run: its text and its figure."""

from __future__ import annotations

import pytest
from torch import nn

import onelaunch as ol
from onelaunch.train.history import History
from tests.reference import problem

pytestmark = pytest.mark.usefixtures("one_thread")


def history_of(loss: str, *, validate: bool = True) -> History:
    x, y = problem(loss)
    validation = (x, y) if validate else None
    return ol.fit(
        nn.Linear(7, 4), x, y, epochs=2, loss=loss, validation=validation, engine="eager", progress=False
    )  # fmt: skip


def test_plot_draws_every_format(tmp_path):
    history = history_of("cross_entropy")
    for kind, magic in (("png", b"\x89PNG"), ("svg", b"<?xm"), ("pdf", b"%PDF")):
        assert history.plot(tmp_path / f"curves.{kind}").read_bytes()[:4] == magic


def test_plot_of_a_regression_and_a_bad_suffix(tmp_path):
    history = history_of("mse", validate=False)
    history.plot(tmp_path / "curves.png")
    with pytest.raises(ol.OnelaunchError, match=r"must end in \.png"):
        history.plot(tmp_path / "curves.docx")


def test_plot_of_more_steps_than_points(tmp_path):
    history = history_of("cross_entropy")
    history.losses = [1.0] * 9001
    history.plot(tmp_path / "curves.png")


def test_repr_is_short():
    text = repr(history_of("cross_entropy"))
    assert "10 steps on eager" in text
    assert "validation loss" in text
