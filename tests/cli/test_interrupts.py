"""Ctrl-C while the command line starts."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from onelaunch.cli.interrupts import exit_on_interrupt, raise_on_interrupt

# Stands in for torch: Ctrl-C arrives while the command's modules are being imported, and not a moment before or after.
INTERRUPTED_IMPORT = """
import signal, sys
sys.argv = ["onelaunch", "info"]
import onelaunch.cli

class Finder:
    def find_spec(self, name, path=None, target=None):
        assert name != "torch" or signal.raise_signal(signal.SIGINT), "the import went on after Ctrl-C"

sys.meta_path.insert(0, Finder())
onelaunch.cli.main()
"""


@pytest.mark.parametrize("prepare", ["", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"])
def test_ctrl_c_during_an_import_ends_with_one_line(prepare, tmp_path):
    (tmp_path / "onelaunch").write_text(prepare + INTERRUPTED_IMPORT)  # the name of the console script
    done = subprocess.run([sys.executable, tmp_path / "onelaunch"], capture_output=True, text=True, check=False)
    if prepare:  # ignored, as under nohup
        assert "the import went on after Ctrl-C" in done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped  interrupted\n")


def test_a_command_gets_keyboard_interrupts_again():
    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    exit_on_interrupt()
    assert signal.getsignal(signal.SIGINT) is not before
    raise_on_interrupt()
    assert signal.getsignal(signal.SIGINT) is before
