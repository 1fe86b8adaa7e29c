"""The page of a run opens with its result and ends with how to use it; several runs make a leaderboard."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from onelaunch.report.machine import busy
from onelaunch.report.write import write_report
from tests.report.conftest import EPOCHS
from tests.report.outline import Outline

PNG = base64.b64encode(b"an image").decode()
IMAGES = {
    "rows": 30, "classes": ["cat", "dog <1>"], "confusion": [[0, 0, 9], [0, 1, 1], [1, 1, 20]],
    "mistakes": [{"true": "cat", "predicted": "dog <1>", "probability": 0.93, "image": PNG}],
}  # fmt: skip
VALUES = {
    "rows": 900, "classes": None, "values": [[1.0, 1.5], [2.0, 2.0]],
    "mistakes": [{"true": 10.25, "predicted": 31.0, "line": 17, "row": {"size": "3", "colour": "<red>"}}],
}  # fmt: skip


def make_run(
    folder: Path, name: str, score: float, predictions: Any = None, data: str = "digits", **about: Any
) -> Path:
    run = folder / name
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in EPOCHS))
    kind = "R²" if predictions is VALUES else "accuracy"
    scores = {"scores": {kind: score, "F1": 0.5}, "constant": {kind: 0.125, "F1": 0.1}}
    content = {"status": "finished", "engine": "cpu", "seconds": 2.0, "parameters": 1234, "scores": scores, **about}
    (run / "run.json").write_text(json.dumps(content))
    (run / "config.toml").write_text(f'optimizer = "adam"\nlr = 0.1\ndata = "{data}"\n')
    (run / "model.safetensors").write_text("")
    if predictions is not None:
        (run / "predictions.json").write_text(json.dumps(predictions))
    return run


def test_the_result_comes_first_and_the_machine_last(tmp_path):
    run = make_run(tmp_path, "run", 0.9625, IMAGES)
    page = write_report([run], tmp_path / "page.html").read_text()
    words = ["96.25 %", "accuracy on 30 held-out rows", "always the most frequent class", "12.50 %", "<h3>Loss</h3>",
             "<h3>Confusion matrix</h3>", "<h3>Accuracy by class</h3>", "<h3>Worst mistakes</h3>", "ol.load(",
             "onelaunch predict", '<details class="about">', "<dt>status</dt>"]  # fmt: skip
    places = [page.index(word) for word in words]
    assert places == sorted(places)
    outline = Outline(page)
    assert outline.open == []
    assert [image["src"] for image in outline.all("img")] == [f"data:image/png;base64,{PNG}"]
    assert "cat → dog <1>" in outline.text
    assert "cat predicted as dog <1>: 1" in outline.text
    assert "90.0 %" in outline.text  # of the class cat
    assert not outline.all("script")


def test_a_regression_shows_predicted_against_true_and_rows(tmp_path):
    outline = Outline(write_report([make_run(tmp_path, "run", 0.5, VALUES)], tmp_path / "page.html").read_text())
    assert "R² on 900 held-out rows" in outline.text
    assert "2 of 900 held-out rows. A perfect prediction lies on the line." in outline.text
    assert len(outline.all("circle")) == 2
    words = "|".join(outline.text)
    assert "line|true|predicted|size|colour|17|10.25|31.00|3|<red>" in words


def test_many_classes_are_shown_by_their_mistakes(tmp_path):
    classes = [f"class {number}" for number in range(50)]
    confusion = [[n, n, 100 - n] for n in range(50)] + [[n, 0, n] for n in range(1, 50)]
    found = {"rows": 5000, "classes": classes, "confusion": confusion, "mistakes": []}
    words = Outline(write_report([make_run(tmp_path, "run", 0.5, found)], tmp_path / "page.html").read_text()).text
    assert "Confusion matrix" not in words
    assert "The 20 classes with the lowest accuracy, of 50." in words
    assert "class 49|class 0|49" in "|".join(words)


NO_IMAGE = {"image": '"><script>', "true": "", "predicted": "", "probability": 1}


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"mistakes": [NO_IMAGE]})])
def test_damaged_predictions_cost_the_page_only_their_figures(tmp_path, content):
    run = make_run(tmp_path, "run", 0.5)
    (run / "predictions.json").write_text(content)
    outline = Outline(write_report([run], tmp_path / "page.html").read_text())
    assert "50.00 %" in outline.text
    assert not outline.all("script")
    assert not outline.all("img")


def test_a_run_without_scores_opens_with_its_last_epoch(tmp_path):
    run = make_run(tmp_path, "run", 0.0, scores=None)
    words = Outline(write_report([run], tmp_path / "page.html").read_text()).text
    assert words[words.index("65.00 %") + 2] == "accuracy after the last epoch"


def test_with_early_stopping_a_run_opens_with_its_best_epoch(tmp_path):
    run = make_run(tmp_path, "run", 0.0, scores=None, best_epoch=0)
    words = Outline(write_report([run], tmp_path / "page.html").read_text()).text
    assert "accuracy after epoch 1, the best" in words


@pytest.mark.parametrize(("about", "words"), [
    ({"best_epoch": 1}, ", which chose it among 3 epochs"),
    ({"best_epoch": 1, "chosen_among": 1200}, ", which chose it among 1,200 networks and 3 epochs"),
    ({"best_epoch": None}, ""),
])  # fmt: skip
def test_a_score_on_rows_that_chose_the_model_says_so(tmp_path, about, words):
    run = make_run(tmp_path, "run", 0.9, IMAGES, **about)
    page = Outline(write_report([run], tmp_path / "page.html").read_text()).text
    assert f"accuracy on 30 held-out rows{words}" in page


def test_several_runs_make_a_leaderboard(tmp_path):
    scores = {"a": 0.7, "b": 0.9, "c": 0.8}
    runs = [make_run(tmp_path, name, score, IMAGES, seconds=10 * score) for name, score in scores.items()]
    runs.append(make_run(tmp_path, "values", 0.99, VALUES))
    page = write_report(runs, tmp_path / "page.html").read_text()
    board = page.split("<h2")[1]
    assert "Leaderboard of 4 runs" in board
    assert re.findall(r'<a href="#part\d">(\w+)</a>', board) == ["b", "c", "a", "values"]
    results = re.findall(r'<td data-key="(-?\d+)">(\d\d\.\d\d % accuracy|0.990 R²)</td>', board)
    assert results == [
        ("2", "90.00 % accuracy"),
        ("1", "80.00 % accuracy"),
        ("0", "70.00 % accuracy"),
        ("-4", "0.990 R²"),
    ]
    heads = re.findall(r'<th scope="col"><button type="button">(.*?)</button>', board)
    assert heads == ["run", "data", "result", "validation loss", "time", "engine", "network"]
    assert "Best first, among runs of the same data and measure" in board
    lines = re.findall(r'<path class="l(\d+)" [^>]*><title>(\w+)</title>', board)
    assert len(set(lines)) == 3  # the same colour in both figures, and no two alike
    assert len({colour for colour, _ in lines}) == 3


def test_runs_on_different_data_are_not_ranked_against_each_other(tmp_path):
    best = make_run(tmp_path, "best", 0.99, IMAGES, "other/iris.csv")
    runs = [best, *(make_run(tmp_path, name, score, IMAGES) for name, score in {"a": 0.7, "b": 0.9}.items())]
    board = write_report(runs, tmp_path / "page.html").read_text().split("<h2")[1]
    assert re.findall(r'<a href="#part\d">(\w+)</a>', board) == ["b", "a", "best"]
    assert re.findall(r"<td [^>]*>(digits|other/iris.csv|\d\d.\d\d %)</td>", board) == [
        "digits", "90.00 %", "digits", "70.00 %", "other/iris.csv", "99.00 %",
    ]  # fmt: skip
    assert len(re.findall(r'<tr class="ours">', board)) == 1  # there is nothing that `best` is better than
    assert "<h3>Validation loss on digits</h3>" in board


def test_a_run_without_a_result_is_not_the_best_of_any(tmp_path):
    runs = [make_run(tmp_path, name, float("nan"), IMAGES) for name in ("a", "b")]
    board = write_report(runs, tmp_path / "page.html").read_text().split("<h2")[1]
    assert '<tr class="ours">' not in board


def test_runs_that_can_all_be_compared_are_sorted_by_their_scores(tmp_path):
    runs = [make_run(tmp_path, name, score, IMAGES) for name, score in {"a": 0.7, "b": 0.9}.items()]
    board = write_report(runs, tmp_path / "page.html").read_text().split("<h2")[1]
    assert re.findall(r'<td data-key="([\d.]+)">\d\d\.\d\d %</td>', board) == ["0.9", "0.7"]
    assert '<button type="button">accuracy</button>' in board
    assert "<h3>Validation loss</h3>" in board


def test_names_of_few_classes_are_not_shortened(tmp_path):
    classes = ["bronze", "silver", "not awarded"]
    found = {"rows": 3, "classes": classes, "confusion": [[0, 0, 1], [1, 1, 1], [2, 2, 1]], "mistakes": []}
    page = write_report([make_run(tmp_path, "run", 1.0, found)], tmp_path / "page.html").read_text()
    chart = page.split("<h3>Confusion matrix</h3>")[1].split("</svg>")[0]
    for name in classes:
        assert len(re.findall(f"<text [^>]*>{name}</text>", chart)) == 2


def test_the_advice_on_overfitting_is_visible(tmp_path):
    run = make_run(tmp_path, "run", 0.9, advice="the loss was lowest in epoch 1: --early-stopping 5 keeps that model")
    page = write_report([run], tmp_path / "page.html").read_text()
    visible = page.split('<details class="about">')[0]
    assert '<p class="note">The loss was lowest in epoch 1: --early-stopping 5 keeps that model.</p>' in visible


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    runs = [make_run(tmp_path / parent, "run", 0.5) for parent in ("one", "two")]
    words = Outline(write_report(runs, tmp_path / "page.html").read_text()).text
    assert all(f"Training run: {run}" in words for run in runs)


def test_the_only_script_is_the_one_that_the_policy_names(tmp_path):
    runs = [make_run(tmp_path, name, 0.5) for name in ("a", "b")]
    page = write_report(runs, tmp_path / "page.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page


def test_only_who_used_the_cores_while_contenders_were_timed_makes_a_machine_busy():
    content = {"machine": {"cpu": {"cores": 16}}, "cores_taken": [11.0, 9.0]}
    assert busy(content)
    assert busy({**content, "cases": [{"cores_taken": None}]})
    assert not busy({**content, "cases": [{"cores_taken": 0.1}, {"cores_taken": 1.2}]})
    assert busy({**content, "cases": [{"cores_taken": 0.1}, {"cores_taken": 8.0}]})
