"""`onelaunch train --resume`, end to end: runs that were stopped, killed or still train, and folders that hold no run."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from onelaunch.train.checkpoint import load_checkpoint
from onelaunch.train.run_folder import RunFolder
from tests.cli.quick_run import FILES, QUICK, visible

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = ("--hidden", "16", "--epochs", 60, "--lr", "0.001", "--engine", "eager")


def test_resume_adds_epochs(cli, blobs, finished_run, tmp_path):
    result = cli("train", "--resume", "run", "--epochs", 6)
    assert result.code == 0
    assert "resume   from step 9" in result.out
    assert cli("train", "--data", blobs, *QUICK, "--epochs", 6, "--out", "whole").code == 0
    assert (finished_run / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    parts, whole = (
        [{**json.loads(line), "seconds": 0} for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "whole")
    )
    assert parts == whole


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        path = folder / "checkpoint.safetensors"
        if path.exists() and load_checkpoint(path).step >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"{folder} did not reach step {step}")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_resumes_to_the_same_bits(cli, start, blobs, tmp_path, how):
    """The schedule makes the run's length part of it, so the resumed run must finish all of it."""
    assert cli("train", "--data", blobs, *LONG, "--out", "whole").code == 0
    process = start("train", "--data", blobs, *LONG, "--out", "stopped")
    wait_for_step(tmp_path / "stopped", 20)
    process.send_signal(how)
    out, err = process.communicate(timeout=240)
    if how == signal.SIGINT:
        assert process.returncode == 130, err
        assert "onelaunch train --resume stopped" in out
        assert json.loads((tmp_path / "stopped/run.json").read_text())["status"] == "interrupted"
        unfinished = [name for name in FILES if name != "predictions.json"]  # a finished run predicts its held-out rows
        assert visible(tmp_path / "stopped") == unfinished
        assert "stopped/report.html" in out
    else:
        (tmp_path / "stopped" / ".model.safetensors.1.tmp").write_bytes(b"half a file")
        with open(tmp_path / "stopped" / "metrics.jsonl", "a") as file:
            file.write('{"epoch": 99, "torn')
    assert load_checkpoint(tmp_path / "stopped/checkpoint.safetensors").step < 60 * 3, "it was stopped too late to tell"
    assert cli("train", "--resume", "stopped").code == 0
    assert visible(tmp_path / "stopped") == FILES
    assert not list((tmp_path / "stopped").glob(".*.tmp"))
    stopped, whole = (tmp_path / name / "model.safetensors" for name in ("stopped", "whole"))
    assert stopped.read_bytes() == whole.read_bytes()
    lines = (tmp_path / "stopped/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == list(range(60))


def test_two_runs_cannot_share_a_folder(cli, blobs, finished_run):
    running = RunFolder.open(finished_run)  # the lock of a process that trains
    try:
        result = cli("train", "--resume", "run", "--epochs", 9)
        assert result.code == 2
        assert "is in use by another run" in result.err
        assert cli("train", "--data", blobs, *QUICK, "--out", "run").code == 2
    finally:
        running.close()


def test_a_run_killed_before_its_first_checkpoint_starts_again(cli, finished_run):
    finished = (finished_run / "model.safetensors").read_bytes()
    for name in FILES:
        if name != "config.toml":
            (finished_run / name).unlink()
    result = cli("train", "--resume", "run")
    assert result.code == 0
    assert "from the beginning" in result.out
    assert (finished_run / "model.safetensors").read_bytes() == finished


def test_a_finished_run_stays_as_it_is(cli, finished_run):
    before = {name: (finished_run / name).read_bytes() for name in FILES}
    result = cli("train", "--resume", "run")
    assert result.code == 0
    assert "is done: nothing is left to train" in result.out
    assert {name: (finished_run / name).read_bytes() for name in FILES} == before


def test_a_run_with_layers_resumes_and_repeats(cli, blobs, tmp_path):
    options = ("--data", blobs, "--layers", "5,8,3", "--epochs", 2, "--schedule", "constant")
    assert cli("train", *options, "--out", "run").code == 0
    assert cli("train", "--resume", "run", "--epochs", 3).code == 0
    assert cli("train", "run/config.toml", "--out", "again").code == 0
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()


def test_a_comparison_is_not_resumed(cli, tmp_path):
    for name in ("config.toml", "compare.json"):
        (tmp_path / name).write_text("")
    outcome = cli("train", "--resume", tmp_path)
    assert outcome.code == 2
    assert "is the folder of a comparison" in outcome.err


def test_resume_without_its_checkpoint_is_refused(cli, finished_run):
    (finished_run / "checkpoint.safetensors").unlink()
    kept = (finished_run / "metrics.jsonl").read_bytes()
    result = cli("train", "--resume", "run")
    assert result.code == 2
    assert "has results but no checkpoint.safetensors" in result.err
    assert (finished_run / "metrics.jsonl").read_bytes() == kept


def test_a_corrupt_checkpoint_is_refused_and_kept(cli, finished_run):
    checkpoint = finished_run / "checkpoint.safetensors"
    broken = checkpoint.read_bytes()[:-100]
    checkpoint.write_bytes(broken)
    result = cli("train", "--resume", "run", "--epochs", 9)
    assert result.code == 2
    assert "is damaged" in result.err
    assert checkpoint.read_bytes() == broken
    assert visible(finished_run) == FILES


def test_resume_after_the_data_changed_is_refused(cli, tmp_path):
    """Twice the size of all houses is the same after scaling, and a held-out row is not trained on: the file is compared."""
    table = "".join(f"{20 + number % 50},{3 * (20 + number % 50) + number % 7}.5\n" for number in range(60))
    (tmp_path / "houses.csv").write_text(f"size,price\n{table}")
    assert cli("train", "--data", "houses.csv", "--target", "price", *QUICK, "--out", "run").code == 0
    kept = {name: (tmp_path / "run" / name).read_bytes() for name in FILES}
    assert "has changed" not in cli("train", "--resume", "run").out
    rows = [line.split(",") for line in table.splitlines()]
    (tmp_path / "houses.csv").write_text("size,price\n" + "".join(f"{2 * int(size)},{price}\n" for size, price in rows))
    result = cli("train", "--resume", "run", "--epochs", 6)
    assert result.code == 2
    assert "houses.csv has changed since the run began: put the earlier file back" in result.err
    assert result.err.count("\n") == 1
    assert {name: (tmp_path / "run" / name).read_bytes() for name in FILES} == kept
    assert "houses.csv has changed since: a new run learns from it" in cli("train", "--resume", "run").out
    (tmp_path / "moved.csv").write_text(f"size,price\n{table}")
    assert cli("train", "--resume", "run", "--epochs", 6, "--data", "moved.csv").code == 0


def test_resume_with_another_model_is_refused(cli, finished_run):
    kept = {name: (finished_run / name).read_bytes() for name in ("model.safetensors", "config.toml")}
    result = cli("train", "--resume", "run", "--hidden", "32")
    assert result.code == 2
    assert "is of another model" in result.err
    assert {name: (finished_run / name).read_bytes() for name in kept} == kept


def test_resume_with_other_columns_is_refused_and_keeps_the_table(cli, tmp_path):
    rows = "".join(f"{number % 5},{number % 3},{number % 2}\n" for number in range(40))
    (tmp_path / "t.csv").write_text(f"a,b,y\n{rows}")
    assert cli("train", "--data", "t.csv", *QUICK, "--out", "run").code == 0
    kept = (tmp_path / "run" / "table.json").read_bytes()
    assert cli("train", "--resume", "run", "--epochs", 6, "--categorical", "a").code == 2
    assert (tmp_path / "run" / "table.json").read_bytes() == kept
    assert cli("predict", "run", "t.csv").code == 0
