"""`onelaunch compare`: table, agreement, page, and what ends it."""

from __future__ import annotations

import json
import re

import pytest
import torch

from onelaunch.bench.contenders import EAGER, OurEngine, TorchLoop
from onelaunch.cli.compare import _show

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning"
    ),  # PyTorch's own, when torch.compile is first used
]
QUICK = ("--hidden", "16", "--epochs", "2", "--lr", "0.01", "--schedule", "constant", "--dropout", "0")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """torch.compile fails, at once instead of after ten seconds of compiling."""

    def make_ready(self, run):
        if self.name != EAGER:
            raise RuntimeError("no compiler here")

    monkeypatch.setattr(TorchLoop, "_make_ready", make_ready)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    monkeypatch.setattr("onelaunch.bench.busy.Watch.cores_taken", lambda self: 0.0)


def test_compare_prints_saves_and_draws(cli, blobs, tmp_path):
    outcome = cli("compare", "--data", blobs, *QUICK, "--seeds", "2", "--sizes", "16,8,16", "--out", "both")
    assert outcome.code == 0, outcome.out + outcome.err
    assert outcome.out.splitlines()[-1] == "report   both/report.html"
    for words in ("torch eager", "onelaunch cpu", "onelaunch eager", "start-up", "peak"):
        assert words in outcome.out
    assert re.search(
        r"onelaunch cpu agrees with torch eager: largest gap of smoothed losses [\d.]+ % .*bound", outcome.out
    )
    assert len(re.findall(r"^trained  .*, seed \d: [\d.]+ (µs|ms) per step, loss", outcome.out, re.M)) == 6
    for word in ("contender", "start-up", "memory", "accuracy"):  # whole, in 80 columns too
        assert re.search(rf"^.* {word}( |$)", outcome.out, re.M)
    assert "absent: torch.compile (RuntimeError: no compiler here)" in outcome.out
    assert re.search(r"^absent: CUDA graph at hidden size 8, 16 \(.+\)$", outcome.out, re.M)
    assert re.search(r"chosen engine against torch eager, by hidden size: 8: [\d.]+×, 16: [\d.]+×", outcome.out)
    saved = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert saved["seeds"] == [0, 1]
    assert saved["finished"]
    assert saved["sizes"]["hidden"] == [8, 16]
    assert saved["command"].startswith("onelaunch compare --")
    assert " --data " in saved["command"]
    assert "--seeds 2" in saved["command"]
    page = (tmp_path / "both" / "report.html").read_text()
    for title in ("Loss curves", "Time of a step over hidden size", "Speed-up over hidden size", "Memory over a step"):
        assert f"<h3>{title}</h3>" in page
    again = cli("report", tmp_path / "both", "--out", "again.html")
    assert again.out == "report   again.html\n"
    assert (tmp_path / "again.html").read_text().count("<figure>") == page.count("<figure>")


def test_compare_ends_with_1_when_an_engine_of_ours_disagrees_with_pytorch(cli, blobs, monkeypatch):
    train = OurEngine.train

    def wrong(self, run):
        result = train(self, run)
        result.losses = [2 * loss for loss in result.losses]
        return result

    monkeypatch.setattr(OurEngine, "train", wrong)
    outcome = cli("compare", "--data", blobs, *QUICK, "--engine", "cpu")
    assert outcome.code == 1
    assert "onelaunch cpu does not agree with torch eager" in outcome.out


def test_compare_ends_with_1_when_an_engine_of_ours_fails(cli, blobs, tmp_path, monkeypatch):
    train = OurEngine.train

    def fails(self, run):
        if self.engine == "cpu":
            raise RuntimeError("illegal instruction")
        return train(self, run)

    monkeypatch.setattr(OurEngine, "train", fails)
    outcome = cli("compare", "--data", blobs, *QUICK, "--out", "red")
    assert outcome.code == 1
    assert "onelaunch cpu failed: RuntimeError: illegal instruction" in outcome.out
    assert "absent: onelaunch cpu" not in outcome.out
    assert json.loads((tmp_path / "red" / "compare.json").read_text())["failed"]


def test_a_size_that_does_not_fit_leaves_table_and_report(cli, blobs, tmp_path):
    sizes = "8,99999999999999999999"
    outcome = cli("compare", "--data", blobs, *QUICK, "--engine", "cpu", "--sizes", sizes, "--out", "big")
    assert outcome.code == 1
    assert "Hidden size 99999999999999999999 was not timed: layers=" in outcome.out
    assert "contender" in outcome.out
    assert (tmp_path / "big" / "report.html").is_file()


def test_each_size_is_saved_before_the_next(cli, blobs, tmp_path, monkeypatch):
    seen = []

    def timed(contenders, run):
        sizes = json.loads((tmp_path / "sizes" / "compare.json").read_text())["sizes"]
        seen.append(sorted(sizes.get("step_seconds", {}).get(EAGER, {})))
        return {one.name: {"median": 1e-3, "minimum": 1e-3, "maximum": 1e-3, "n": 3} for one in contenders}, {}

    monkeypatch.setattr("onelaunch.bench.sizes.time_steps", timed)
    assert cli("compare", "--data", blobs, *QUICK, "--sizes", "8,16", "--out", "sizes").code == 0
    assert seen == [[], ["8"]]


def test_the_table_fits_any_terminal(cli, blobs, tmp_path, monkeypatch, capsys):
    assert cli("compare", "--data", blobs, *QUICK, "--engine", "cpu", "--seeds", "2", "--out", "two").code == 0
    results = json.loads((tmp_path / "two" / "compare.json").read_text())
    for columns in (40, 60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        _show(results)
        out = capsys.readouterr().out
        table = out.split("validation rows\n")[1].split("\n\n")[0].splitlines()
        assert max(map(len, table)) <= columns
        assert "…" not in out
        assert re.search(r"\d [mµ]?s\b", "\n".join(table))
        if columns == 40:
            assert "onelaunch cpu" in table
            assert any(re.fullmatch(r"  final accuracy  [\d.]+ % ± [\d.]+ %", line) for line in table)


def test_an_interrupted_comparison_keeps_what_is_done(cli, blobs, tmp_path, monkeypatch):
    def interrupted(self, run):
        raise KeyboardInterrupt

    monkeypatch.setattr(OurEngine, "train", interrupted)
    outcome = cli("compare", "--data", blobs, *QUICK, "--out", "cut")
    assert outcome.code == 130
    saved = json.loads((tmp_path / "cut" / "compare.json").read_text())
    assert saved["interrupted"]
    assert set(saved["contenders"]) == {"torch eager"}
    assert not saved["finished"]
    assert "Interrupted" in (tmp_path / "cut" / "report.html").read_text()
    assert "Not run: onelaunch eager (seed 0), onelaunch cpu (seed 0)" in outcome.out
    assert outcome.out.splitlines()[-1] == "stopped  interrupted: finished contenders are kept"


def test_a_comparison_interrupted_before_its_first_contender_leaves_nothing(cli, blobs, tmp_path, monkeypatch):
    def interrupted(self, run):
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchLoop, "train", interrupted)
    outcome = cli("compare", "--data", blobs, *QUICK, "--out", "cut")
    assert outcome.code == 130
    assert outcome.out.endswith("interrupted before the first contender had finished: nothing is kept\n")
    assert not (tmp_path / "cut").exists()


def test_a_comparison_killed_before_its_first_contender_is_no_run(cli, blobs, tmp_path, monkeypatch):
    class Killed(BaseException):
        """Ends the command as a kill does: no handler deals with it."""

    def killed(self, run):
        raise Killed

    monkeypatch.setattr(TorchLoop, "train", killed)
    with pytest.raises(Killed):
        cli("compare", "--data", blobs, *QUICK, "--out", "killed")
    assert json.loads((tmp_path / "killed" / "compare.json").read_text())["finished"] is False
    outcome = cli("train", "--resume", "killed")
    assert (outcome.code, "is the folder of a comparison" in outcome.err) == (2, True)
    again = cli("compare", "--data", blobs, "--out", "killed")
    assert (again.code, again.err) == (2, "error: out='killed' is not empty: pass another folder\n")


def test_a_busy_machine_is_noted(cli, blobs, monkeypatch):
    monkeypatch.setattr("onelaunch.cli.compare.cores_taken_before", lambda: 30.0)
    outcome = cli("compare", "--data", blobs, *QUICK, "--engine", "cpu")
    assert "note     others use this machine (30.0 of " in outcome.out


def test_a_ratio_on_a_busy_machine_is_no_number(cli, blobs, tmp_path, monkeypatch):
    """Times are shown and saved, but neither the terminal nor the page compares them."""
    monkeypatch.setattr("onelaunch.bench.busy.Watch.cores_taken", lambda self: 100.0)
    outcome = cli("compare", "--data", blobs, *QUICK, "--engine", "cpu", "--sizes", "8", "--out", "loud")
    assert outcome.code == 0, outcome.out + outcome.err
    assert "chosen engine against torch eager, by hidden size: machine busy\n" in outcome.out
    assert "note     machine busy: others used 100.0 cores meanwhile" in outcome.out
    assert "×" not in outcome.out
    saved = json.loads((tmp_path / "loud" / "compare.json").read_text())
    assert saved["busy"] is True
    page = (tmp_path / "loud" / "report.html").read_text()
    assert ", machine busy" in page
    assert "Time of a step over hidden size" in page
    assert "Speed-up over hidden size" not in page
    assert not re.search(r"[\d.]×", page)


def test_a_comparison_that_diverges_is_drawn_and_saved_as_json(cli, blobs, tmp_path):
    outcome = cli(
        "compare", "--data", blobs, *QUICK, "--lr", "1e30", "--optimizer", "sgd", "--out", "wild", "--seeds", "2"
    )
    assert outcome.code == 1, outcome.out + outcome.err
    assert "torch eager, onelaunch eager and onelaunch cpu all diverged (at step 2)" in outcome.out
    text = (tmp_path / "wild" / "compare.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["contenders"][EAGER]["final"]["loss"]["mean"] is None
    page = (tmp_path / "wild" / "report.html").read_text()
    assert not any("nan" in figure for figure in re.findall(r"<svg.*?</svg>", page))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seeds", "0"), "seeds=0 must be 1 to 1000"),
        (("--seeds", str(10**30)), "must be 1 to 1000"),
        (("--seed", str(2**64 - 1), "--seeds", "2"), "go beyond 64 bits"),
        (("--hidden", "", "--sizes", "8"), "has no hidden layer"),
        (("--sizes", "8,0"), "sizes=[8, 0]"),
        (("--sizes", "8;16"), "is not a list of numbers"),
        (("--hidden", "5,,5"), "is not a list of numbers"),
        (("--sizes", ""), "sizes=[] is empty"),
        (("--sizes", ","), "sizes=[] is empty"),
        (("--out", ""), "out='' names no folder"),
        (("--optimizer", "adma"), "did you mean 'adam'"),
    ],
)
def test_bad_arguments_end_with_2(cli, blobs, arguments, message):
    outcome = cli("compare", "--data", blobs, *arguments)
    assert outcome.code == 2
    assert message in outcome.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the engine can run here")
def test_an_engine_chosen_by_name_that_cannot_run_ends_with_2(cli, blobs, tmp_path):
    outcome = cli("compare", "--data", blobs, *QUICK, "--engine", "resident", "--out", "none")
    assert outcome.code == 2
    assert "engine='resident' cannot run this" in outcome.err
    assert not (tmp_path / "none").exists()


def test_a_run_that_cannot_be_made_leaves_no_folder(cli, blobs, tmp_path):
    outcome = cli("compare", "--data", blobs, "--layers", "5,4,2", "--out", "none")
    assert outcome.code == 2
    assert "is not a class of this model" in outcome.err
    assert not (tmp_path / "none").exists()
