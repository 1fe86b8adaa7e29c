"""`onelaunch info`, `onelaunch bench` and help."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onelaunch
from onelaunch.bench.case import REGISTRY, Trial, case
from onelaunch.bench.run import select
from onelaunch.cli import main
from onelaunch.engines import FASTEST_FIRST


def test_info_names_versions_devices_and_every_engine(cli):
    result = cli("info")
    assert result.code == 0
    assert f"onelaunch        {onelaunch.__version__}" in result.out
    for engine in FASTEST_FIRST:
        line = next(line for line in result.out.splitlines() if line.startswith(f"engine {engine} "))
        assert re.search(r"(yes|no: .+); needs .+", line)
        assert "model lies" not in line


def test_help_lists_every_key(cli):
    result = cli("train", "--help")
    assert result.code == 0
    for flag in ("--batch-size", "--data-dir", "--resume", "--label-smoothing", "--no-nesterov"):
        assert flag in result.out


def test_version(cli):
    assert cli("--version").out == f"onelaunch {onelaunch.__version__}\n"


def test_unknown_command_ends_with_2(cli):
    assert cli("trian").code == 2


@pytest.fixture
def temporary_cases():
    select("all")  # loads the real cases, once
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


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


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["trian"], "'train'.*see onelaunch --help"),
        (["train", "--epochs", "abc"], "'abc' for '--epochs'.*integer.*see onelaunch train --help"),
        (["compare", "--seeds", "abc"], "'abc' for '--seeds'.*integer"),
        (["bench", "--limit", "abc"], "'abc' for '--limit'.*number"),
        (["bench", "--nope"], "--nope.*see onelaunch bench --help"),
        (["explain"], "model.*see onelaunch explain --help"),
    ],
)
def test_a_mistake_on_the_command_line_takes_one_line(arguments, names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["onelaunch", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    assert re.fullmatch(f"error: .*{names}.*\n", said.err)


@pytest.mark.parametrize(("arguments", "code", "begins"), [(["--version"], 0, "onelaunch "), ([], 2, "Usage: ")])
def test_what_is_no_mistake_is_answered(arguments, code, begins, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["onelaunch", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert "".join(capsys.readouterr()).startswith(begins)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_standard_output_is_told_in_a_line():
    command = (sys.executable, "-m", "onelaunch", "--version")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


def test_nobody_who_reads_the_output_is_no_error_to_tell():
    read, write = os.pipe()
    os.close(read)
    command = (sys.executable, "-m", "onelaunch", "--version")
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
