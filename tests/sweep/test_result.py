"""What a sweep returns: table, page, figure, DataFrame; and the checkpoint folder from which it continues."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import onelaunch as ol
from onelaunch.sweep import driver
from onelaunch.sweep.kept_weights import KeptWeights
from onelaunch.sweep.member import Member, Record
from onelaunch.sweep.page import page
from onelaunch.sweep.progress import LineSweepProgress
from tests.conftest import ROOT
from tests.sweep.killed import told, whole_sweep
from tests.sweep.models import make_model, rows, same_weights

X, Y = rows()
GRID = {"lr": [1e-3, 1e-2, 1e30], "width": [4, 8], "optimizer": ["sgd"], "seed": [0, 1]}


def page_of(sweep: ol.Sweep) -> str:
    return page(sweep.table, sweep.records, {"members": len(sweep.members), "seconds": 1.0, "plan": ""})


@pytest.fixture(scope="module")
def result() -> ol.Sweep:
    return ol.sweep(make_model, X, Y, grid=GRID, folds=2, epochs=2, progress=False)


def test_the_table_is_sorted_and_has_mean_and_deviation(result):
    means = [row.mean for row in result.table if not math.isnan(row.mean)]
    assert means == sorted(means, reverse=True)
    best = result.best
    values = [result.records[index].value("accuracy") for index in best.members]
    assert best.mean == pytest.approx(np.mean(values))
    assert best.std == pytest.approx(np.std(values))
    assert len(best.members) == 4
    text = str(result.table)
    assert "validation accuracy" in text
    assert "±" in text
    assert "4 of 4 failed" in text
    assert "6 candidates" in text


def test_pandas_has_candidates_and_members(result):
    table = result.to_pandas()
    assert list(table.columns[:3]) == ["lr", "width", "optimizer"]
    assert len(table) == 6
    members = result.to_pandas(members=True)
    assert len(members) == 24
    assert {"seed", "split", "accuracy", "error"} <= set(members.columns)


def test_histories_have_all_members(result):
    assert len(result.histories) == 24
    assert result.histories[-1].losses[:1] == result.histories[23].losses[:1]
    assert len(result.histories[:3]) == 3
    assert [history.losses[:1] for history in result.histories] == [h.losses[:1] for h in result.histories[:]]
    for index in (24, -25):
        for read in (result.histories.__getitem__, result.model):
            with pytest.raises(ol.OnelaunchError, match=f"member {index} is not there: the sweep has 24") as caught:
                read(index)
            assert isinstance(caught.value, IndexError)
    assert same_weights(result.model(-24), result.model(0))


def test_the_plan_names_the_engine(result):
    assert "5-4-3, batch 32, sgd: cpu" in result.plan


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_figure(result, tmp_path, suffix):
    assert result.plot(tmp_path / f"sweep.{suffix}").stat().st_size > 1000


def test_the_page_holds_everything_and_fetches_nothing(result, tmp_path):
    text = result.html(tmp_path / "folder" / "sweep.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.S)[0])
    assert [entry["name"] for entry in data["parameters"]] == ["lr", "width"]
    assert len(data["rows"]) == 6
    assert data["rows"][-1]["mean"] is None
    assert "prefers-color-scheme:dark" in text
    assert "width=device-width" in text


def test_text_from_the_grid_cannot_leave_its_place_in_the_page():
    result = ol.sweep(
        lambda name: make_model(), X, Y, grid={"name": ["</script><script>alert(1)", "b"]}, epochs=1, progress=False
    )
    assert "<script>alert" not in page_of(result)


def test_the_page_of_ten_thousand_candidates_is_small():
    members = [Member(i, i, {"lr": 10 ** -(1 + i % 500 / 100), "width": i % 7}, 0, 0) for i in range(10_000)]
    epochs = np.array([[0, 3, 0.5, 0.9, 1e-3, 0.1, 0.4, 0.8]])
    records = {
        i: Record(i, np.zeros(3, np.float32), epochs, ("loss", "accuracy"), {}, 0.1, None, total=3, per_epoch=3)
        for i in range(10_000)
    }
    sweep = ol.Sweep(members, records, "accuracy", True, "", 1.0)
    assert len(page_of(sweep)) < 3_000_000
    assert "and 9,980 more" in str(sweep.table)


def test_weights_of_the_worst_are_dropped_first():
    import torch

    kept = KeptWeights("loss", limit=4000)
    for index in range(20):
        kept.add(index, float(index), {"w": torch.zeros(100)})
    assert kept.get(0) is not None
    assert kept.get(10) is None


def test_lines_say_how_far_a_sweep_is():
    import io

    out = io.StringIO()
    shown = LineSweepProgress(out, seconds=0.0)
    with shown.running(10, 0):
        for done in range(1, 11):
            shown.update(done, "accuracy 90 %")
    lines = out.getvalue().splitlines()
    assert re.fullmatch(r"sweep 1/10 members, best member: accuracy 90 %, .* left", lines[0])
    assert lines[-1] == "sweep 10/10 members, best member: accuracy 90 %"


def test_a_model_whose_weights_were_dropped_is_trained_again(result, monkeypatch):
    expected = result.best_model
    again = ol.sweep(make_model, X, Y, grid=GRID, folds=2, epochs=2, progress=False)
    monkeypatch.setattr(KeptWeights, "get", lambda self, index: None)
    assert same_weights(again.best_model, expected)


SCRIPT = """
import sys
import onelaunch as ol
from onelaunch.sweep import store
from tests.sweep.killed import told, whole_sweep
from tests.sweep.models import make_model, rows
from tests.sweep.killed import told, whole_sweep
store.MIN_SECONDS, store.SHARE_OF_TIME = 0.01, 0
print(told(whole_sweep(sys.argv[1], checkpoint=sys.argv[2])))
"""


@pytest.mark.parametrize("strategy", ["grid", "halving"])
def test_a_killed_sweep_continues_to_the_same_table(tmp_path, strategy):
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    command = [sys.executable, "-c", SCRIPT, strategy, str(tmp_path / "a")]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    while not list((tmp_path / "a").glob("part-*")) and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    found = len(list((tmp_path / "a").glob("part-*")))
    assert found
    resumed = whole_sweep(strategy, checkpoint=tmp_path / "a")
    assert told(resumed) == told(whole_sweep(strategy))
    assert len(list((tmp_path / "a").glob("part-*"))) > found, "nothing was left to train"


def arguments(folder: Path) -> dict[str, Any]:
    return {"grid": {"lr": [1e-3, 1e-2]}, "epochs": 1, "checkpoint": folder, "progress": False}


def test_a_finished_checkpoint_is_read_and_nothing_trained(tmp_path, monkeypatch):
    first = ol.sweep(make_model, X, Y, **arguments(tmp_path / "a"))
    monkeypatch.setattr(driver, "train", lambda jobs, *rest: [pytest.fail("trained again") for _ in jobs])
    second = ol.sweep(make_model, X, Y, **arguments(tmp_path / "a"))
    assert str(first.table) == str(second.table)
    assert same_weights(first.best_model, second.best_model)
    assert second.histories[1].epochs == first.histories[1].epochs


def test_another_sweep_does_not_continue(tmp_path):
    ol.sweep(make_model, X, Y, **arguments(tmp_path / "a"))
    with pytest.raises(ol.CheckpointError, match=r"holds another sweep.*data"):
        ol.sweep(make_model, X + 1, Y, **arguments(tmp_path / "a"))
    with pytest.raises(ol.CheckpointError, match=r"holds another sweep.*grid"):
        ol.sweep(make_model, X, Y, **{**arguments(tmp_path / "a"), "grid": {"lr": [1e-3]}})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    with pytest.raises(ol.CheckpointError, match="is not empty"):
        ol.sweep(make_model, X, Y, **arguments(tmp_path / "b"))
    part = next((tmp_path / "a").glob("part-*"))
    part.write_bytes(part.read_bytes()[:50])
    with pytest.raises(ol.CheckpointError, match="damaged"):
        ol.sweep(make_model, X, Y, **arguments(tmp_path / "a"))


ARRAYS = {"fold 0": (list(range(50)), list(range(50, 60))), "fold 1": (list(range(50)), list(range(55, 60)))}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"validation": (X[:30], Y[:30])}, {"validation": (X[30:60], Y[30:60])}),
        ({"folds": [ARRAYS["fold 0"], ARRAYS["fold 0"]]}, {"folds": [ARRAYS["fold 0"], ARRAYS["fold 1"]]}),
        ({"rows": [range(40), range(20)]}, {"rows": [range(40), range(20, 50)]}),
    ],
    ids=["validation", "folds", "rows"],
)
def test_other_rows_are_another_sweep(first, second, tmp_path):
    options = {"grid": {"lr": [0.1, 0.01]}, "epochs": 1, "progress": False, "checkpoint": tmp_path / "kept"}
    ol.sweep(make_model, X, Y, **first, **options)
    with pytest.raises(ol.OnelaunchError, match="holds another sweep"):
        ol.sweep(make_model, X, Y, **second, **options)


def test_a_function_as_loss_continues_in_its_checkpoint(tmp_path):
    def make_loss():
        def loss(output, y):
            return nn.functional.cross_entropy(output, y)

        return loss

    options = {"grid": {"lr": [0.1]}, "epochs": 1, "progress": False, "checkpoint": tmp_path / "kept"}
    tables = [str(ol.sweep(make_model, X, Y, loss=make_loss(), **options).table) for _ in range(2)]
    assert tables[0] == tables[1]


def test_mistakes_of_make_model_get_one_line():
    one = make_model()
    with pytest.raises(ol.OnelaunchError, match="make_model returned the same module twice: return a new one"):
        ol.sweep(lambda: one, X, Y, grid={"lr": [0.1, 0.2]}, epochs=1, progress=False)
    with pytest.raises(
        ol.OnelaunchError, match="make_model: missing a required argument: 'width': add the name to grid"
    ):
        ol.sweep(lambda width: make_model(width), X, Y, grid={"lr": [0.1]}, epochs=1, progress=False)


def test_a_sweep_in_which_every_member_fails_is_drawn(tmp_path):
    grid = {"lr": [1e30, 1e31], "optimizer": ["sgd"]}
    result = ol.sweep(make_model, X, Y, grid=grid, epochs=2, progress=False, validation=0.2)
    assert len(result.failures) == 2
    result.plot(tmp_path / "sweep.png")
    result.html(tmp_path / "sweep.html")


def test_parameters_named_like_results_are_kept_beside_them(tmp_path):
    def model(mean: int, std: float, members: int, param_mean: int, failed: str, seed_: int = 0) -> nn.Module:
        return make_model(mean * members)

    grid = {"mean": [2, 4], "std": [0.5], "members": [3], "param_mean": [7], "failed": ["no"], "steps": [5, 9]}
    result = ol.sweep(model, X, Y, grid=grid, validation=0.2, progress=False, metric="loss")
    frame = result.to_pandas()
    assert len(set(frame.columns)) == len(frame.columns) == 6 + 6
    for row, (_, found) in zip(result.table, frame.iterrows(), strict=True):
        own = row.parameters
        names = {"mean": "param_param_mean", "std": "param_std", "members": "param_members", "param_mean": "param_mean",
                 "failed": "param_failed", "steps": "param_steps"}  # fmt: skip
        assert {name: found[column] for name, column in names.items()} == own
        assert (found["mean"], found["std"], found["members"]) == (row.mean, row.std, 1)
        assert (found["steps"], found["failed"]) == (own["steps"], 0)
    assert (frame["mean"] < 3).all()
    members = result.to_pandas(members=True)
    assert members["param_steps"].tolist() == [5, 9, 5, 9] == members["steps"].tolist()
    assert members["mean"].tolist() == [2, 2, 4, 4]
    result.html(tmp_path / "sweep.html")
    result.plot(tmp_path / "sweep.png")
    assert "param_mean" in str(result.table)


def test_a_parameter_named_like_the_metric_is_kept_beside_it():
    result = ol.sweep(make_model, X, Y, grid={"loss": ["cross_entropy"]}, epochs=1, progress=False, metric="loss")
    members = result.to_pandas(members=True)
    assert members["param_loss"].tolist() == ["cross_entropy"]
    assert members["loss"].tolist() == [result.best.mean]


def test_files_of_a_result(tmp_path):
    result = ol.sweep(make_model, X, Y, grid={"lr": [0.1]}, epochs=1, progress=False)
    for write, name in ((result.plot, "sweep.png"), (result.html, "sweep.html")):
        assert write(tmp_path / "new" / name).exists()
        (tmp_path / name).mkdir()
        with pytest.raises(ol.OnelaunchError, match=f"{name}' cannot be written: Is a directory; pass a writable path"):
            write(tmp_path / name)
        with pytest.raises(TypeError, match="path=3 is not a path"):
            write(3)
