from __future__ import annotations

import subprocess
import sys

import pytest

from onelaunch.bench import busy
from onelaunch.device import usable_cores


@pytest.mark.skipif(usable_cores() > 4, reason="keeps every core busy")
def test_others_who_use_the_machine_are_noticed():
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * usable_cores())]
    try:
        busy.cores_taken.cache_clear()
        assert busy.cores_taken() > usable_cores() * 0.3
        assert busy.warning().startswith("others use this machine (")
    finally:
        for process in others:
            process.kill()
            process.wait()
        busy.cores_taken.cache_clear()


def test_a_quiet_machine_gives_no_warning(monkeypatch):
    monkeypatch.setattr(busy, "cores_taken", lambda: 0.0)
    assert busy.warning() == ""
