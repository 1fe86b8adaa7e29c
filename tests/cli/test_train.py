"""`onelaunch train`, end to end: the run folder, what ends a run and what does not, exit code 2 for every mistake."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from onelaunch.cli import main
from onelaunch.cli.app import make_app
from onelaunch.errors import DivergedError
from onelaunch.operating_system import usable_cores
from onelaunch.report.write import write_report
from onelaunch.train.checkpoint import load_checkpoint
from onelaunch.train.mlp import mlp
from onelaunch.train.predictor import load
from tests import pairwise
from tests.cli.quick_run import FILES, QUICK, visible

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_leaves_its_folder(cli, blobs, tmp_path):
    result = cli("train", "--data", blobs, *QUICK, "--out", "result")
    assert result.code == 0
    assert [line[:9] for line in result.err.splitlines()] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert result.out.splitlines()[-3:] == [
        "run      result", "report   result/report.html", "predict  onelaunch predict result rows.npy"
    ]  # fmt: skip
    assert re.search(
        r"\n\d+\.\d\d %  accuracy on 80 held-out rows \(always the most frequent class: .*\)\n[▁-█]{9}  training loss ",
        result.out,
    )
    assert "blobs.npz, 400 rows of 5, 3 classes" in result.out
    folder = tmp_path / "result"
    assert visible(folder) == FILES
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["hidden"] == [16]
    assert config["seed"] == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert [len(line["losses"]) for line in lines] == [3, 3, 3]
    assert lines[-1]["validation"]["accuracy"] > 0.5
    about = json.loads((folder / "run.json").read_text())
    assert about["status"] == "finished"
    assert about["machine"]["versions"]["torch"]
    assert about["engine"]
    assert about["date"]
    assert "commit" in about
    model = mlp([5, 16, 3], dropout=0.2)
    model.load_state_dict(load_file(folder / "model.safetensors"))


def test_the_page_says_how_to_load_the_model(finished_run, monkeypatch, tmp_path, capsys):
    """The program on the page runs as it stands, in the folder where the page was made."""
    monkeypatch.chdir(tmp_path)
    write_report([Path("run")], Path("page.html"))
    program, _ = re.findall(r"<pre[^>]*><code>(.*?)</code>", Path("page.html").read_text(), re.DOTALL)
    rows = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    np.save("rows.npy", rows)
    exec(html.unescape(program), {})
    assert capsys.readouterr().out == f"{load(finished_run).predict(rows)}\n"


def test_a_dated_folder_under_runs_by_default(cli, blobs, tmp_path):
    first = cli("train", "--data", blobs, *QUICK)
    second = cli("train", "--data", blobs, *QUICK)
    assert first.code == second.code == 0
    folders = sorted(folder.name for folder in (tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert all(re.fullmatch(r"\d{8}-\d{6}-blobs(-2)?", name) for name in folders)


def test_same_seed_same_bits(cli, blobs, finished_run, tmp_path):
    assert cli("train", "--data", blobs, *QUICK, "--out", "again").code == 0
    model = (finished_run / "model.safetensors").read_bytes()
    assert (tmp_path / "again/model.safetensors").read_bytes() == model
    assert cli("train", "--data", blobs, *QUICK, "--seed", 1, "--out", "other").code == 0
    assert (tmp_path / "other/model.safetensors").read_bytes() != model


def test_a_folder_that_holds_only_a_lock_counts_as_empty(cli, blobs, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("")
    assert cli("train", "--data", blobs, *QUICK, "--out", "run").code == 0


def test_a_full_disk_is_one_line(cli, blobs, tmp_path, monkeypatch):
    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onelaunch.train.run_folder.write_atomic", full)
    result = cli("train", "--data", blobs, *QUICK, "--out", "run")
    assert result.code == 2
    assert "No space left on device" in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_reader_that_leaves_does_not_end_the_run(cli, blobs, tmp_path, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), open(write, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        arguments = ["train", "--data", blobs, *QUICK, "--out", "run"]
        make_app()(arguments, standalone_mode=False)
        sys.stdout.close()  # the null device that took the place of the pipe
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "finished"


def test_a_diverging_run_ends_with_1_and_leaves_a_report(cli, blobs, tmp_path):
    result = cli("train", "--data", blobs, "--hidden", "16", "--optimizer", "sgd", "--lr", "1e12", "--out", "bad")
    assert result.code == 1
    assert re.search(r"error: .* step \d+.*smaller lr", result.err)
    assert load_checkpoint(tmp_path / "bad/checkpoint.safetensors").step >= 0
    assert "step" in json.loads((tmp_path / "bad/run.json").read_text())["status"]
    assert (tmp_path / "bad" / "report.html").is_file()


def test_a_run_that_diverges_late_has_its_curves(cli, blobs, tmp_path, monkeypatch):
    def diverges(first_step, losses, checkpoint):
        if first_step:
            raise DivergedError("the loss is nan at step 4: pass a smaller lr", 4)

    monkeypatch.setattr("onelaunch.train.loop.raise_if_diverged", diverges)
    result = cli("train", "--data", blobs, *QUICK, "--out", "bad")
    assert (result.code, "at step 4" in result.err) == (1, True)
    assert visible(tmp_path / "bad") == [
        name for name in FILES if name not in ("model.safetensors", "predictions.json")
    ]
    assert json.loads((tmp_path / "bad/run.json").read_text())["engine"]


def test_a_path_that_is_not_utf8_does_not_end_the_run(blobs, tmp_path, monkeypatch, capsys):
    odd = os.fsencode(tmp_path) + b"/odd-\xff"
    os.mkdir(odd)
    os.rename(blobs, odd + b"/blobs.npz")
    paths = ["--data", os.fsdecode(odd + b"/blobs.npz"), "--out", os.fsdecode(odd + b"/run")]
    monkeypatch.setattr(sys, "argv", ["onelaunch", "train", *QUICK, *paths])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert all(line.startswith("epoch ") for line in capsys.readouterr().err.splitlines())
    assert os.path.isfile(odd + b"/run/report.html")
    with open(odd + b"/run/config.toml", "rb") as file:
        assert tomllib.load(file)["hidden"] == [16]


def test_a_network_that_does_not_fit_into_memory_is_one_line(cli, blobs, tmp_path, monkeypatch):
    def full(*arguments: object, **options: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("onelaunch.cli.train.fit_with", full)
    result = cli("train", "--data", blobs, *QUICK, "--out", "run")
    assert result.code == 2
    assert "this run does not fit into memory" in result.err
    assert "--hidden" in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_data_far_from_one_gets_a_note(cli, tmp_path):
    number = np.arange(100)
    for name, y in (("values", number * 1000.0), ("classes", number)):
        np.savez(tmp_path / f"{name}.npz", x=(number % 7)[:, None].astype(np.float32), y=y)
    values = cli("train", "--data", "values.npz", *QUICK, "--out", "one")
    assert re.search(r"the targets vary by 2\.[89]\d*e\+04 and are not scaled", values.out)
    classes = cli("train", "--data", "classes.npz", *QUICK, "--out", "two")
    assert "100 classes in 80 rows: to learn numbers pass --loss mse" in classes.out


def test_regression_from_a_csv(cli, tmp_path):
    rows = "\n".join(f"{i % 7},{i % 3},{(i % 7) * 2 + (i % 3)}" for i in range(200))
    (tmp_path / "table.csv").write_text(f"a,b,price\n{rows}\n")
    options = ("--target", "price", "--loss", "mse", "--hidden", "16", "--epochs", 30, "--dropout", 0, "--lr", 0.03)
    result = cli("train", "--data", "table.csv", *options, "--out", "run")
    assert result.code == 0
    assert "values in column 'price'" in result.out
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["accuracy"] is None
    assert lines[-1]["validation"]["loss"] < 0.1 * lines[0]["validation"]["loss"]


MISTAKES = {
    "unknown key": (("typo.toml",), "config key 'batch_sise' is not known; did you mean 'batch_size'"),
    "wrong type": (("type.toml",), "epochs='ten' has the wrong type"),
    "no such config": (("none.toml",), "config 'none.toml' cannot be read"),
    "negative width": (("--hidden", "16,-3"), "hidden=[16, -3] must be widths of 1 or more"),
    "data as config": (("mnist",), "for that data pass --data mnist"),
    "no list": (("--hidden", "16;3"), "is not a list of numbers"),
    "unknown flag": (("--bach-size", "3"), "No such option"),
    "flag type": (("--epochs", "many"), "Invalid value for '--epochs'"),
    "dropout": (("--dropout", "1.5"), "dropout=1.5 must be between 0 and 1"),
    "activation": (("--activation", "rely"), "did you mean 'relu'"),
    "engine": (("--engine", "resident"), "; pass --engine auto"),
    "precision": (("--precision", "fp12"), "precision='fp12' is not known"),
    "unknown data": (("--data", "minst"), "did you mean 'mnist'"),
    "no such file": (("--data", "none.csv"), "none.csv: no such file"),
    "too few outputs": (("--layers", "5,4,2"), r"y[2]=2 is not a class of this model"),
    "wrong inputs": (("--layers", "4,3"), "x has 5 values per row, the model's first Linear takes 4"),
    "no layers": (("--layers", ","), "layers=[] must be two or more widths"),
    "both lengths": (("--epochs", "2", "--steps", "3"), "epochs and steps are both given"),
    "not a run": (("--resume", "nowhere"), "is not a run folder"),
    "resume and config": (("typo.toml", "--resume", "run"), "leave out CONFIG"),
    "folder in use": (("--out", "full"), "out='full' is not empty"),
    "out is empty": (("--out", ""), "out='' names no folder: pass one, or leave it out"),
    "huge width": (("--hidden", "99999999999"), ": pass smaller widths in hidden"),
    "width beyond any": (("--hidden", "9" * 30), ": pass smaller widths in hidden"),
    "folder of images": (("--data", "digits", "--data-dir", "nosuch"), "data_dir='nosuch' is for mnist or fashion"),
    "no list of betas": (("--betas", "0.9,x"), "such as 0.9,0.999"),
    "no remedy": (("none.toml",), "pass a TOML file, or leave it out"),
    "out below a file": (("--out", "blobs.npz/run"), "cannot be written"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_with_2_and_one_line(cli, blobs, tmp_path, mistake):
    (tmp_path / "typo.toml").write_text("batch_sise = 3\n")
    (tmp_path / "type.toml").write_text('epochs = "ten"\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("mine")
    before = visible(tmp_path)
    arguments, message = MISTAKES[mistake]
    data = () if "--data" in arguments or "--resume" in arguments else ("--data", blobs)
    out = () if "--out" in arguments or "--resume" in arguments else ("--out", "run")
    result = cli("train", *arguments, *data, *out)
    assert result.code == 2, result.err
    assert message in result.err
    assert "Traceback" not in result.err
    if result.err.startswith("error:"):
        assert result.err.count("\n") == 1
    assert visible(tmp_path) == before, "something was left behind"


@pytest.mark.timeout(1200)  # 20 s of one core, of which a busy machine may give little
@pytest.mark.parametrize("seed", [0, 1, 2] if pairwise.ALL_CASES else [0])
def test_full_mnist_default_passes_98(cli, full_mnist, tmp_path, seed):
    """The promise of the default config."""
    torch.set_num_threads(usable_cores())
    assert cli("train", "--data-dir", full_mnist, "--seed", seed, "--out", "run").code == 0
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation"]["accuracy"] >= 0.98


def test_the_options_of_fit_are_flags_and_keys(cli, blobs, tmp_path):
    flags = ["--class-weight", "0=1,2=3", "--clip-norm", "1", "--metrics", "f1,roc_auc", "--early-stopping", "2"]
    run = ["--hidden", "16", "--epochs", "60", "--schedule", "constant", "--lr", "0.05", "--out", "result"]
    result = cli("train", "--data", blobs, *run, *flags)
    assert result.code == 0, result.err
    config = tomllib.loads((tmp_path / "result/config.toml").read_text())
    assert config["class_weight"] == {"0": 1.0, "2": 3.0}
    assert (config["clip_norm"], config["metrics"], config["early_stopping"]) == (1.0, ["f1", "roc_auc"], 2)
    epochs = [json.loads(line) for line in (tmp_path / "result/metrics.jsonl").read_text().splitlines()]
    losses = [epoch["validation"]["loss"] for epoch in epochs]
    assert len(losses) < 60
    assert f"best epoch {losses.index(min(losses)) + 1} of {len(losses)}: " in result.out
    assert set(epochs[0]["validation"]) == {"loss", "accuracy", "f1", "roc_auc"}
    (tmp_path / "rule.toml").write_text('early_stopping = {patience = 2, metric = "f1"}\nclass_weight = {0 = 1.0}\n')
    again = cli("train", tmp_path / "rule.toml", "--data", blobs, *run[:-1], "other")
    assert again.code == 0, again.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--class-weight", "7=1"], "class_weight names '7', which is not a class of blobs.npz: it has 0, 1, 2"),
        (["--early-stopping", "0"], "early_stopping.patience=0 must be 1 or more"),
        (["--clip-norm", "0"], "clip_norm=0 would remove every gradient"),
        (["--metrics", "f1,auc"], "metrics='auc' is not known"),
    ],
)
def test_bad_options_of_fit_get_one_line(cli, blobs, flags, message):
    result = cli("train", "--data", blobs, *QUICK, *flags)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1
