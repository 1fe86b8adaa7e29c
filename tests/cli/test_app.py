"""The application around the commands: help, version, mistakes on the command line, exit codes, closed output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onelaunch
from onelaunch.cli import main
from onelaunch.shipped import shipped_root


def test_help_lists_every_key(cli):
    result = cli("train", "--help")
    assert result.code == 0
    for flag in ("--batch-size", "--data-dir", "--resume", "--label-smoothing", "--no-nesterov"):
        assert flag in result.out


def test_version(cli):
    assert cli("--version").out == f"onelaunch {onelaunch.__version__}\n"


def test_examples_say_where_they_are_and_how_they_are_used(cli, tmp_path):
    listed = cli("examples").out
    assert f"\nin {shipped_root()}\n" in listed
    assert "onelaunch examples FOLDER" in listed.splitlines()[-1]
    copied = cli("examples", tmp_path / "mine").out.splitlines()
    assert copied[-2] == f"in {tmp_path / 'mine'}"
    assert copied[-1].startswith("run a script: python FILE.py")


def test_unknown_command_ends_with_2(cli):
    assert cli("trian").code == 2


def test_ctrl_c_that_a_command_says_nothing_about_is_one_line(cli, monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("onelaunch.cli.info.run_info", interrupted)
    result = cli("info")
    assert (result.code, result.out, result.err) == (130, "", "stopped  interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["trian"], "'train'.*see onelaunch --help"),
        (["train", "--epochs", "abc"], "'abc' for '--epochs'.*integer.*see onelaunch train --help"),
        (["compare", "--seeds", "abc"], "'abc' for '--seeds'.*integer"),
        (["bench", "--limit", "abc"], "'abc' for '--limit'.*number"),
        (["train", "--learning-rate", "0.1"], "--learning-rate; did you mean --lr\\?.*see onelaunch train --help"),
        (["bench", "--nope"], "--nope.*see onelaunch bench --help"),
        (["explain"], "model.*see onelaunch explain --help"),
    ],
)
def test_a_mistake_on_the_command_line_takes_one_line(arguments, names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["onelaunch", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert re.fullmatch(f"error: .*{names}.*\n", printed.err)


@pytest.mark.parametrize(("arguments", "code", "begins"), [(["--version"], 0, "onelaunch "), ([], 2, "Usage: ")])
def test_version_and_no_arguments_are_answered(arguments, code, begins, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["onelaunch", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert "".join(capsys.readouterr()).startswith(begins)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_standard_output_is_one_line():
    command = (sys.executable, "-m", "onelaunch", "--version")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


def test_output_that_nobody_reads_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = (sys.executable, "-m", "onelaunch", "--version")
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
