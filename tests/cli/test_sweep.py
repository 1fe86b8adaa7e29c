"""`onelaunch sweep`: lists in a config, the folder it leaves, and the best model as a run of its own."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import signal
import time
import tomllib

import numpy as np
import pytest

import onelaunch as ol
import onelaunch.cli.sweep
from onelaunch.sweep.driver import Driver
from onelaunch.sweep.spread import LostWorkerError
from onelaunch.sweep.store import Store

CONFIG = """
data = "blobs.npz"
hidden = [[4], [6, 5]]
lr = [0.001, 0.03]
seed = [0, 1]
dropout = 0.0
epochs = 2
batch_size = 64
"""


@pytest.fixture
def config(tmp_path, blobs):
    path = tmp_path / "grid.toml"
    path.write_text(CONFIG)
    return path


def table(folder):
    return list(csv.DictReader((folder / "table.csv").read_text().splitlines()))


def test_a_lost_worker_is_one_line(cli, config, monkeypatch):
    def lost(*_arguments, **_options):
        raise LostWorkerError("n_jobs=2: a worker process ended")

    monkeypatch.setattr(onelaunch.cli.sweep, "sweep", lost)
    outcome = cli("sweep", config, "--out", "found", "--no-progress")
    assert outcome.code == 2
    assert outcome.err == (
        "error: a worker process ended, perhaps for lack of memory; finished members are saved, continue with: "
        "onelaunch sweep found/sweep.toml --out found\n"
    )


def test_the_folder_has_table_page_and_best_model(cli, config, tmp_path):
    outcome = cli("sweep", config, "--out", "found", "--no-progress")
    assert outcome.code == 0, outcome.err
    assert "4 candidates" in outcome.out
    folder = tmp_path / "found"
    rows = table(folder)
    assert len(rows) == 4
    assert rows[0]["hidden"] in ("[4]", "[6, 5]")
    assert float(rows[0]["mean"]) >= float(rows[-1]["mean"])
    page = (folder / "sweep.html").read_bytes()
    assert len(page) > 5000
    assert "held-out rows, which chose it among 8 networks" in outcome.out
    assert "which chose it among 8 networks" in (folder / "best" / "report.html").read_text()
    assert (folder / "sweep.png").exists()
    best = ol.load(folder / "best")
    assert best.predict(np.zeros((2, 5), np.float32)).shape == (2,)
    again = cli("sweep", config, "--out", "found", "--no-progress")
    assert again.code == 0, again.err
    assert table(folder) == rows
    assert (folder / "sweep.html").read_bytes() == page  # it says how the sweep ran


def test_a_resumed_best_run_still_says_that_it_was_chosen(cli, config):
    config.write_text(CONFIG + 'schedule = "constant"\n')
    assert cli("sweep", config, "--out", "found", "--no-progress").code == 0
    resumed = cli("train", "--resume", "found/best", "--epochs", 3, "--no-progress")
    assert "which chose it among 8 networks" in resumed.out, resumed.err


def test_folds_and_flags(cli, config, tmp_path):
    outcome = cli("sweep", config, "--out", "found", "--folds", 2, "--lr", 0.01, "--strategy", "random", "--n", 1)
    assert outcome.code == 0, outcome.err
    rows = table(tmp_path / "found")
    assert "which chose it" not in outcome.out  # the folds did
    assert [row["members"] for row in rows] == ["4"]
    assert "lr" not in rows[0]


@pytest.mark.parametrize(("line", "message"), [
    ("lr = [0.1, -1.0]", "lr=-1.0 must be a finite number"),
    ('optimizer = ["adam", "sdg"]', "optimizer='sdg' is not known"),
    ("lrr = [0.1]", "config key 'lrr' is not known; did you mean 'lr'?"),
    ('data = ["a.npz", "b.npz"]', "cannot be a list: it is the same for all members"),
    ("lr = []", "lr=[] is empty"),
    ("folds = [2, 3]", "folds=[2, 3] has the wrong type"),
])  # fmt: skip
def test_mistakes_are_one_line(cli, tmp_path, blobs, line, message):
    path = tmp_path / "bad.toml"
    path.write_text(line + ("" if line.startswith("data") else '\ndata = "blobs.npz"') + "\nepochs = 1\n")
    outcome = cli("sweep", path, "--out", "found")
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_config_without_lists(cli, tmp_path, blobs):
    path = tmp_path / "one.toml"
    path.write_text('data = "blobs.npz"\n')
    assert "no list of values" in cli("sweep", path).err


def test_ctrl_c_keeps_what_is_finished(start, config, tmp_path):
    config.write_text(CONFIG.replace("[0, 1]", str(list(range(3000)))))
    process = start("sweep", config, "--out", "found", "--no-progress")
    while not list((tmp_path / "found" / "members").glob("part-*")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "continue with: onelaunch sweep" in out
    assert (tmp_path / "found" / "table.csv").exists()


def test_ctrl_c_while_an_earlier_start_is_read(cli, config, monkeypatch):
    options = ("--out", "found", "--no-progress", "--strategy", "halving")
    assert cli("sweep", config, *options).code == 0
    read = Store._read

    def interrupted(self, *given):
        signal.raise_signal(signal.SIGINT)
        return read(self, *given)

    monkeypatch.setattr(Store, "_read", interrupted)
    outcome = cli("sweep", config, *options)
    assert (outcome.code, outcome.err) == (130, "")
    assert "continue with: onelaunch sweep" in outcome.out


@pytest.mark.parametrize(("name", "words"), [
    ("sweep", "no network is finished; start again with: "),  # before the first member
    ("_report", "saved; continue with: "),
    ("_train_best", "saved; continue with: "),
])  # fmt: skip
def test_ctrl_c_at_any_time_says_how_to_continue(cli, config, tmp_path, monkeypatch, name, words):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    options = ("--out", "found", "--no-progress")
    with monkeypatch.context() as patch:
        patch.setattr(onelaunch.cli.sweep, name, interrupted)
        outcome = cli("sweep", config, *options)
    assert (outcome.code, outcome.err) == (130, "")
    assert outcome.out.endswith(f"stopped  {words}onelaunch sweep found/sweep.toml --out found\n")
    assert cli("sweep", "found/sweep.toml", *options).code == 0
    assert cli("sweep", config, "--out", "whole", "--no-progress").code == 0
    assert table(tmp_path / "found") == table(tmp_path / "whole")


def test_ctrl_c_before_the_first_member_starts_again(cli, config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Driver, "_train", lambda *_arguments: signal.raise_signal(signal.SIGINT))
        outcome = cli("sweep", config, "--out", "found", "--no-progress")
    assert outcome.code == 130
    assert "no network is finished; start again with: onelaunch sweep found/sweep.toml --out found" in outcome.out
    assert cli("sweep", "found/sweep.toml", "--out", "found", "--no-progress").code == 0


def test_ctrl_c_while_data_are_read_promises_nothing(cli, config, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(onelaunch.cli.sweep, "load_data", interrupted)
    outcome = cli("sweep", config, "--out", "found", "--no-progress")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "stopped  interrupted\n")


def test_a_full_disk_at_the_end_still_shows_the_table(cli, config, monkeypatch):
    write = onelaunch.cli.sweep.write_atomic

    def full(path, content):
        if path.name == "table.csv":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(onelaunch.cli.sweep, "write_atomic", full)
    outcome = cli("sweep", config, "--out", "found", "--no-progress")
    assert outcome.code == 2
    assert "4 candidates" in outcome.out
    assert "table.csv' cannot be written: No space left on device; free some space" in " ".join(outcome.err.split())


def test_the_folder_of_a_sweep_is_not_that_of_a_run(cli, config, tmp_path):
    assert cli("sweep", config, "--out", "found", "--no-progress").code == 0
    shutil.rmtree(tmp_path / "found" / "members")
    outcome = cli("sweep", config, "--out", "found", "--no-progress")
    assert (outcome.code, outcome.err) == (2, "error: out='found' is not empty: pass another folder\n")
    outcome = cli("train", "--resume", "found")
    assert (outcome.code, "is not a run folder" in outcome.err) == (2, True)
    outcome = cli("predict", "found", "blobs.npz")
    assert (outcome.code, "it is that of a sweep, pass found/best" in " ".join(outcome.err.split())) == (2, True)


def test_the_command_that_continues_a_sweep_has_the_flags(cli, config, tmp_path, monkeypatch):
    flags = ("--out", "found", "--no-progress", "--steps", 20, "--lr", 0.01, "--folds", 2)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", _interrupting(Store.add))
        outcome = cli("sweep", config, *flags)
    assert outcome.code == 130
    said = " ".join(outcome.out.split())
    assert "continue with: onelaunch sweep found/sweep.toml --out found" in said
    written = tomllib.loads((tmp_path / "found" / "sweep.toml").read_text())
    expected = tomllib.loads(CONFIG) | {"steps": 20, "lr": 0.01, "folds": 2, "data": str(tmp_path / "blobs.npz")}
    del expected["epochs"]
    assert written == expected
    changed = cli("sweep", "found/sweep.toml", "--out", "found", "--no-progress", "--epochs", 3)
    assert (changed.code, "holds another sweep" in changed.err) == (2, True)
    assert tomllib.loads((tmp_path / "found" / "sweep.toml").read_text()) == expected
    assert cli("sweep", "found/sweep.toml", "--out", "found", "--no-progress").code == 0
    assert cli("sweep", config, "--out", "whole", *flags[2:]).code == 0
    assert table(tmp_path / "found") == table(tmp_path / "whole")


def _interrupting(add):
    """`Store.add` with a Ctrl-C after the first member; a second one would end the sweep at once."""
    signals = iter([signal.SIGINT])

    def interrupted(self, *given):
        add(self, *given)
        for number in signals:
            signal.raise_signal(number)

    return interrupted


def test_the_best_run_repeats_from_its_config(cli, config, tmp_path):
    """Also where the best seed is not the one that chose the rows held out."""
    for first, second in ((3, 8), (8, 3)):
        config.write_text(CONFIG.replace("[0, 1]", str([first, second])).replace("[[4], [6, 5]]", "[6, 5]"))
        folder, again = tmp_path / f"found{first}", tmp_path / f"again{first}"
        assert cli("sweep", config, "--out", folder, "--no-progress").code == 0
        assert cli("train", folder / "best" / "config.toml", "--out", again, "--no-progress").code == 0
        runs = [json.loads((path / "run.json").read_text()) for path in (folder / "best", again)]
        assert runs[0]["scores"] == runs[1]["scores"]
        assert tomllib.loads((folder / "best" / "config.toml").read_text())["split_seed"] == first
        weights = [(path / "model.safetensors").read_bytes() for path in (folder / "best", again)]
        assert weights[0] == weights[1]


def test_class_weights_by_name_may_be_a_list(cli, tmp_path):
    rows = "".join(f"{number % 5},{number % 3},{'yes' if number % 4 else 'no'}\n" for number in range(60))
    (tmp_path / "t.csv").write_text("a,b,t\n" + rows)
    (tmp_path / "grid.toml").write_text(
        'data="t.csv"\ntarget="t"\nepochs=1\nclass_weight=[{no=1.0,yes=3.0},{no=3.0,yes=1.0},"balanced"]\n'
    )
    outcome = cli("sweep", "grid.toml", "--out", "found", "--no-progress")
    assert outcome.code == 0, outcome.err
    assert [row["failed"] for row in table(tmp_path / "found")] == ["0"] * 3
    weight = tomllib.loads((tmp_path / "found" / "best" / "config.toml").read_text())["class_weight"]
    assert weight in ({"no": 1.0, "yes": 3.0}, {"no": 3.0, "yes": 1.0}, "balanced")


def test_a_corrected_config_takes_the_folder_of_the_mistake(cli, config, tmp_path):
    config.write_text(CONFIG.replace("seed = [0, 1]", "seed = [0, 0]"))
    wrong = cli("sweep", config, "--out", "found", "--no-progress")
    assert (wrong.code, "repeats a seed" in wrong.err) == (2, True)
    config.write_text(CONFIG)
    assert cli("sweep", config, "--out", "found", "--no-progress").code == 0
    assert tomllib.loads((tmp_path / "found" / "sweep.toml").read_text())["seed"] == [0, 1]
