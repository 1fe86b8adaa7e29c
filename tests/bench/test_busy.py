from __future__ import annotations

import subprocess
import sys
import time

import pytest

from onelaunch.bench import busy
from onelaunch.device import usable_cores

# Not for ever: nobody ends it where the tests themselves are killed.
BUSY = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@pytest.mark.skipif(usable_cores() > 4, reason="keeps every core busy")
def test_others_who_use_the_machine_are_noticed():
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 * usable_cores())]
    try:
        watch = busy.Watch()
        assert busy.cores_taken() > usable_cores() * 0.3
        time.sleep(0.3)
        assert watch.cores_taken() > usable_cores() * 0.5
    finally:
        for process in others:
            process.kill()
            process.wait()


def test_people_are_warned_where_others_take_much():
    assert busy.warning(0.0) == ""
    assert busy.warning(30.0).startswith("others use this machine (30.0 of ")
