"""Lines that fit into a terminal of 80 columns, and stay whole in a file or a pipe."""

from __future__ import annotations

import sys

from onelaunch.cli.info import run_info
from onelaunch.cli.say import say

ENGINE = "cpu, the fastest that can run this here (resident, graph, compiled: this machine has no CUDA device)"


def pretend_terminal(monkeypatch):
    """Inside a test: between its fixtures and its body pytest changes sys.stdout."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def test_a_long_line_is_wrapped_on_a_terminal(monkeypatch, capsys):
    pretend_terminal(monkeypatch)
    say("engine", ENGINE)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "engine   cpu, the fastest that can run this here (resident, graph, compiled:"
    assert second == "         this machine has no CUDA device)"


def test_a_command_stays_whole_to_be_copied(monkeypatch, capsys):
    pretend_terminal(monkeypatch)
    command = f"onelaunch predict {'a-long-name' * 8} new.csv"
    say("predict", command)
    assert capsys.readouterr().out == f"predict  {command}\n"


def test_nothing_is_wrapped_in_a_file(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    say("engine", ENGINE)
    assert capsys.readouterr().out == f"engine   {ENGINE}\n"


def test_info_fits_into_80_columns(monkeypatch, capsys):
    pretend_terminal(monkeypatch)
    run_info()
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
