from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from onelaunch.bench import busy


@pytest.fixture
def clock(monkeypatch) -> None:
    """Every reading is 10 ms after the last one, and our threads get 1.5 of the 4 cores that they ask for."""
    now = itertools.count()
    fake = SimpleNamespace(perf_counter=lambda: 0.01 * next(now), process_time=lambda: 0.015 * next(now))
    monkeypatch.setattr(busy, "time", fake)
    monkeypatch.setattr(busy, "_thread_count", lambda: 4)
    monkeypatch.setattr(busy, "SECONDS", 0.2)


@pytest.mark.usefixtures("clock")
def test_cores_that_we_ask_for_and_do_not_get_are_taken():
    assert busy.cores_taken() == pytest.approx(2.5, abs=0.3)


@pytest.mark.usefixtures("clock")
def test_a_watch_subtracts_our_own_time(monkeypatch):
    busy_seconds, own_seconds = iter([100.0, 103.0]), iter([5.0, 6.0])
    monkeypatch.setattr(busy, "_busy_seconds", lambda: next(busy_seconds))
    monkeypatch.setattr(busy, "_own_seconds", lambda: next(own_seconds))
    watch = busy.Watch()
    for _ in range(99):
        busy.time.perf_counter()
    assert watch.cores_taken() == pytest.approx((3.0 - 1.0) / 1.0)


@pytest.mark.usefixtures("clock")
def test_a_watch_asks_for_cores_where_the_system_counts_nothing(monkeypatch):
    monkeypatch.setattr(busy, "_busy_seconds", lambda: None)
    assert busy.Watch().cores_taken() == pytest.approx(2.5, abs=0.3)


def test_the_system_counts_busy_time():
    before = busy._busy_seconds()
    if before is None:
        pytest.skip("this system has no /proc/stat")
    assert 0 < before <= (busy._busy_seconds() or 0)


def test_processes_that_we_started_and_that_still_run_count_as_ours():
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True); input()"
    before = busy._seconds_of_descendants()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        if not Path("/proc/self/stat").exists():
            pytest.skip("this system has no /proc")
        assert busy._seconds_of_descendants() - before > 0.2
        child.communicate(b"\n")


def test_a_warning_where_others_use_much():
    assert busy.warning(0.0) == ""
    assert busy.warning(30.0).startswith("others use this machine (30.0 of ")
