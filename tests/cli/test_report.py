"""`onelaunch report`: what it draws, leaves out and refuses."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")


def test_report_of_a_training_run(cli, finished_run, tmp_path):
    outcome = cli("report", "run", "--out", "page.html")
    assert outcome.code == 0
    page = (tmp_path / "page.html").read_text()
    assert "<h3>Loss</h3>" in page
    assert "<h3>Accuracy</h3>" in page
    assert "blobs.npz" in page


def test_report_leaves_out_what_it_cannot_read(cli, finished_run, tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    finished_run.rename(folder / "run 1")
    (folder / "cut.json").write_text('{"cases": [')
    (folder / "future.json").write_text(
        json.dumps({"cases": [{"group": "ops"}], "machine": {"versions": {"onelaunch": "9.9"}}})
    )
    outcome = cli("report", "results")
    assert outcome.code == 0
    cut, future = outcome.err.splitlines()
    assert cut.startswith("left out 'results/cut.json' is not JSON: ")
    assert "'results/future.json' is not as onelaunch writes it" in future
    assert "written by onelaunch 9.9" in future
    page = (tmp_path / "report.html").read_text()
    assert "<h3>Loss</h3>" in page
    assert "Left out: &#x27;results/cut.json&#x27; is not JSON" in page
    assert "made by <code>onelaunch train &#x27;results/run 1/config.toml&#x27;</code>" in page
    assert cli("train", "results/run 1/config.toml", "--out", "again").code == 0  # pasted
    assert "made by <code>onelaunch report results</code>" in page
    assert cli("report", "results/cut.json", "results/future.json").code == 2


def test_report_refuses_what_it_cannot_draw(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "it holds no results" in cli("report", "empty").err
    assert "cannot be read" in cli("report", "nowhere.json").err
    (tmp_path / "other.json").write_text('{"hello": 1}')
    assert "neither a result of `onelaunch bench` nor of `onelaunch compare`" in cli("report", "other.json").err
    (tmp_path / "odd.json").write_text('{"cases": [{"group": "ops"}]}')
    assert "is not as onelaunch writes it" in cli("report", "odd.json").err
    outcome = cli("report", "other.json", "--out", "page.txt")
    assert outcome.code == 2
    assert "must end in .html" in outcome.err
    assert not list(tmp_path.glob("*.html"))
