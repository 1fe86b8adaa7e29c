"""`onelaunch bench` and `bench diff`."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

import onelaunch
from onelaunch.bench.case import REGISTRY, Trial, case
from onelaunch.bench.ceilings import Ceilings
from onelaunch.bench.measure import summarise
from onelaunch.bench.results import new_path, only_writer
from onelaunch.bench.run import run_case, select


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """Whatever else runs beside the tests."""
    monkeypatch.setattr("onelaunch.bench.busy.Watch.cores_taken", lambda self: 0.0)


@pytest.fixture
def temporary_cases():
    """Cases registered in the test are removed after it."""
    select("all")  # loads the real cases, once
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def results(ours: float, peer: float = 10e-6) -> dict:
    times = {name: {"median": value, "spread": 0.02} for name, value in (("onelaunch", ours), ("torch", peer))}
    return {"cases": [{"name": "ops/x", "check": "passed", "times": times}]}


def write(path, content) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_diff_tells_slower_from_noise(cli, tmp_path):
    old, same, near, slow = (write(tmp_path / f"{t}.json", results(t * 1e-6)) for t in (5.0, 5.05, 5.15, 6.0))
    quiet = cli("bench", "diff", old, same)
    assert (quiet.code, "same" in quiet.out, "too noisy" in quiet.out) == (0, True, False)
    unclear = cli("bench", "diff", old, near)
    assert unclear.code == 0
    assert "too noisy to tell: the spreads exceed the difference in 1 of 1 cases" in unclear.out
    loud = cli("bench", "diff", old, slow)
    assert loud.code == 1
    assert "slower" in loud.out
    assert "+20.0%" in loud.out


def test_diff_shows_long_names_whole(cli, tmp_path, monkeypatch):
    name = "train/pixels/784-128-128-128-10/32/adam/bf16/and-more"
    content = results(8.509e-1)
    content["cases"][0]["name"] = name
    file = write(tmp_path / "long.json", content)
    for columns in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = cli("bench", "diff", file, file).out
        assert any(line.strip().split(" ")[0] == name for line in out.splitlines())
        assert "851 ms" in out
        assert all(len(line) <= columns for line in out.splitlines() if name not in line)


def test_diff_refuses_what_is_no_result(cli, tmp_path):
    old = write(tmp_path / "old.json", results(5e-6))
    assert "takes two results files (got 1)" in cli("bench", "diff", old).err
    assert "cannot be read: No such file or directory; pass what" in cli("bench", "diff", old, "nowhere.json").err
    assert "holds no benchmark cases" in cli("bench", "diff", old, write(tmp_path / "list.json", [1])).err
    (tmp_path / "text.json").write_text("{")
    outcome = cli("bench", "diff", old, tmp_path / "text.json")
    assert (outcome.code, "is not JSON" in outcome.err) == (2, True)


def test_results_are_saved_under_runs_with_the_command_and_the_machine(cli, tmp_path, temporary_cases):
    case("train/tiny", "train", "nothing")(lambda: Trial(ours=lambda: 1, check=lambda: None))
    outcome = cli("bench", "train", "--filter", "train/tiny", "--quick")
    assert outcome.code == 0
    assert re.fullmatch(r"case     1 of 1: train/tiny, (60|59) s left for train\n", outcome.err)
    (path,) = (tmp_path / "runs").glob("*-bench.json")
    assert outcome.out.splitlines()[-1] == f"saved    {path.relative_to(tmp_path)}"
    saved = json.loads(path.read_text())
    assert saved["command"] == "onelaunch bench train --filter train/tiny --quick"
    assert saved["machine"]["cpu"]["name"]
    assert saved["date"][:2] == "20"
    assert saved["cases"][0]["times"]["onelaunch"]["n"] >= 4


def test_a_difference_below_the_spreads_is_called_too_noisy_to_tell(cli, temporary_cases):
    times = itertools.cycle([1.0e-3, 1.3e-3])
    trial = Trial(ours=lambda: next(times), check=lambda: None, peers={"alike": lambda: 1.1e-3, "slow": lambda: 9e-3},
                  self_timed=True)  # fmt: skip
    case("train/noisy", "train", "nothing")(lambda: trial)
    outcome = cli("bench", "train", "--filter", "train/noisy", "--quick")
    assert "too noisy to tell from alike: 1.0" in outcome.out
    assert "too noisy to tell from slow" not in outcome.out


def test_a_ratio_on_a_busy_machine_is_no_number(cli, tmp_path, monkeypatch, temporary_cases):
    """Times are shown and saved, but neither the terminal nor the page compares them; nor does `diff`."""
    monkeypatch.setattr("onelaunch.bench.busy.Watch.cores_taken", lambda self: 100.0)
    trial = Trial(lambda: 1e-3, lambda: None, {"slow": lambda: 0.16}, self_timed=True)
    case("train/loud", "train", "nothing")(lambda: trial)
    outcome = cli("bench", "train", "--filter", "train/loud", "--quick", "--out", "loud.json")
    assert re.search(r" slow +160 ms .* machine busy\n", outcome.out)
    assert "machine busy: others used 100.0 cores meanwhile" in outcome.out
    assert "faster" not in outcome.out
    assert cli("report", "loud.json", "--out", "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "160 ms, machine busy" in page
    assert "160×" not in page
    assert "too noisy to tell" in cli("bench", "diff", "loud.json", "loud.json").out


def test_the_device_is_timed_whatever_others_do_with_the_cores(monkeypatch, temporary_cases):
    monkeypatch.setattr("onelaunch.bench.busy.Watch.cores_taken", lambda self: 100.0)
    monkeypatch.setattr(
        "onelaunch.bench.run.measure", lambda contenders, **options: ({"onelaunch": summarise([1.0, 1.0])}, {})
    )
    case("train/device", "train", "nothing")(lambda: Trial(lambda: 1, lambda: None, cuda=True))
    assert run_case(REGISTRY["train/device"], quick=True, ceilings=Ceilings())["busy"] is False


def test_quick_names_what_a_minute_per_group_leaves_out(cli, monkeypatch, temporary_cases):
    monkeypatch.setattr("onelaunch.bench.run.QUICK_SECONDS", 0.5)
    for number in (1, 2):
        case(f"train/brief/{number}", "train", "nothing")(lambda: Trial(ours=lambda: 1, check=lambda: None))
    outcome = cli("bench", "train", "--filter", "train/brief", "--quick")
    assert (outcome.code, outcome.err) == (0, "")
    words = " ".join(outcome.out.split())
    assert (
        "left out 2 cases (60 s per group with --quick): train/brief/1, train/brief/2; run them with --filter" in words
    )


def test_times_have_the_unit_that_fits_on_any_terminal(cli, monkeypatch, temporary_cases):
    trial = Trial(ours=lambda: 0.8509, check=lambda: None, peers={"torch": lambda: 1.7018}, self_timed=True)
    case("train/slow", "train", "nothing", unit="start")(lambda: trial)
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = cli("bench", "train", "--filter", "train/slow", "--quick").out
        assert "851 ms" in out
        assert "2.00× faster" in out
        assert "e+0" not in out
        assert "…" not in out
        assert all(len(line) <= columns for line in out.splitlines() if not line.startswith("saved"))


def test_a_busy_machine_is_noted(cli, monkeypatch, temporary_cases):
    for place in ("cli.bench", "bench.results"):
        monkeypatch.setattr(f"onelaunch.{place}.cores_taken_before", lambda: 30.0)
    monkeypatch.setattr("onelaunch.bench.busy.Watch.cores_taken", lambda self: 31.0)
    case("train/tiny", "train", "nothing")(lambda: Trial(ours=lambda: 1, check=lambda: None))
    outcome = cli("bench", "train", "--filter", "train/tiny", "--quick", "--out", "saved.json")
    assert outcome.out.startswith("others use this machine (30.0 of ")
    assert json.loads(Path("saved.json").read_text())["cores_taken"] == [30.0, 31.0]
    assert "others used this machine (31.0 of " in outcome.out


def test_out_is_a_file_of_its_own(cli, tmp_path):
    """A device or a pipe stays what it is, a link leads to its file, and diff saves nothing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    outcome = cli("bench", "cpu", "--limit", "0", "--out", pipe)
    assert (outcome.code, "cannot be written: it is not a file" in outcome.err) == (2, True)
    assert pipe.is_fifo()
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link.json", tmp_path / "far" / "target.json"
    link.symlink_to(target)
    assert cli("bench", "cpu", "--limit", "0", "--out", link).code == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["finished"] is True
    outcome = cli("bench", "diff", target, target, "--out", tmp_path / "x.json")
    assert (outcome.code, "diff measures and saves nothing; leave out --out" in outcome.err) == (2, True)


def test_two_at_once_do_not_save_into_one_file(cli, tmp_path):
    out = tmp_path / "one.json"
    with only_writer(out):
        outcome = cli("bench", "cpu", "--limit", "0", "--out", out)
    assert (outcome.code, "is being written by another run: pass another path" in outcome.err) == (2, True)
    assert not list(tmp_path.iterdir())
    assert cli("bench", "cpu", "--limit", "0", "--out", out).code == 0


def test_runs_started_in_one_second_save_to_different_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len({new_path() for _ in range(20)}) == 20


def test_ctrl_c_keeps_what_is_done_and_ends_with_130(cli, tmp_path, temporary_cases):
    """Ctrl-C strikes in the second of three cases."""

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)

    for name, ours in (("1", lambda: 1), ("2", interrupted), ("3", lambda: 1)):
        case(f"train/cut/{name}", "train", "nothing")(partial(Trial, ours=ours, check=lambda: None))
    outcome = cli("bench", "train", "--filter", "train/cut", "--quick", "--out", "results.json")
    assert outcome.code == 130, outcome.err
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["interrupted"]
    assert not saved["finished"]
    assert outcome.err.splitlines()[-1] == "stopped  interrupted; not run: train/cut/2, train/cut/3"
    assert [one["name"] for one in saved["cases"]] == ["train/cut/1"]
    assert saved["cases"][0]["times"]["onelaunch"]["median"] > 0
    assert outcome.out.splitlines()[-1] == "saved    results.json"


def test_control_characters_in_a_file_do_not_reach_the_terminal(cli, tmp_path):
    content = results(5e-6)
    content["cases"][0]["name"] = "ops/\x1b[2Jx"
    file = write(tmp_path / "evil.json", content)
    outcome = cli("bench", "diff", file, file)
    assert outcome.code == 0
    assert "\x1b" not in outcome.out
    outcome = cli("bench", "diff", file, file, "--quick")
    assert (outcome.code, "leave out --quick" in outcome.err) == (2, True)


@pytest.mark.usefixtures("one_thread")
def test_bench_times_ours_and_its_peers(cli, tmp_path):
    result = cli("bench", "train", "--filter", "64-32-10", "--quick", "--out", "results.json")
    assert result.code == 0, result.err
    saved = json.loads((tmp_path / "results.json").read_text())
    one = saved["cases"][0]
    assert one["check"] == "passed"
    assert set(one["times"]) == {"onelaunch", "eager engine", "PyTorch loop"}
    assert all(timing["n"] >= 4 and timing["median"] > 0 for timing in one["times"].values())
    assert saved["machine"]["versions"]["torch"]


def test_bench_prints_no_time_for_a_case_that_is_wrong(cli, tmp_path, temporary_cases):
    def wrong() -> None:
        raise AssertionError("losses differ by 3.0")

    case("train/broken", "train", "a broken fast path")(lambda: Trial(ours=lambda: 1, check=wrong))
    result = cli("bench", "train", "--filter", "broken", "--out", "results.json")
    assert result.code == 1
    assert "losses differ by 3.0" in result.out
    assert "µs" not in result.out
    assert json.loads((tmp_path / "results.json").read_text())["cases"][0]["times"] == {}


def test_bench_goes_on_without_a_peer_that_raises(cli, temporary_cases):
    def raises() -> None:
        raise RuntimeError("no such instruction")

    trial = Trial(ours=lambda: 1, check=lambda: None, peers={"bad": raises}, absent={"JAX": "not installed"})
    case("train/peer", "train", "a peer that raises")(lambda: trial)
    result = cli("bench", "train", "--filter", "train/peer", "--quick")
    assert result.code == 0
    assert "no such instruction" in result.out
    assert "not installed" in result.out


def test_bench_skips_what_this_machine_cannot_run(cli, temporary_cases):
    def needs_gpu() -> Trial:
        raise onelaunch.UnsupportedError("needs a CUDA device")

    case("train/gpu-only", "train", "a case for GPUs")(needs_gpu)
    result = cli("bench", "train", "--filter", "gpu-only")
    assert result.code == 0
    assert "skipped: needs a CUDA device" in result.out


def test_bench_says_which_cases_there_are(cli):
    result = cli("bench", "train", "--filter", "nothing like it")
    assert result.code == 2
    assert "train/64-32-10" in result.err
    assert cli("bench", "trian").code == 2


def test_bench_refuses_options_that_say_nothing(cli, tmp_path):
    for arguments, message in (
        (("cpu", "--large"), "large=True leaves no case: leave out --large"),
        (("cpu", "--limit", "-1"), "limit=-1 must be 0 or more"),
    ):
        result = cli("bench", *arguments)
        assert result.code == 2
        assert message in result.err
    assert not list(tmp_path.rglob("*.json"))


def test_bench_looks_where_to_save_before_it_measures(cli, tmp_path):
    result = cli("bench", "train", "--out", tmp_path)
    assert result.code == 2
    assert "cannot be written: it is a folder" in result.err
