"""compute-sanitizer reports no access out of bounds, no race in shared memory and no misused barrier."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.sanitizer.programs import PROGRAMS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
TOOLS = ("memcheck", "racecheck", "synccheck")
# racecheck gives no error but four warnings for members in clusters by units. It did not say which: all we know is that single
# runs in such clusters, and members in one block or in clusters by rows, have none. Rows fetched by one block for the whole
# cluster, whose memory the next member clears, exist there only.
UNEXPLAINED = {("racecheck", "members-cluster-by-units")}


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on the path")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_found(tool, program):
    if (tool, program) in UNEXPLAINED:
        pytest.xfail("four warnings whose cause is not known")
    watched = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    if tool == "memcheck":  # the bindings look up driver functions that may not exist, which is no error
        watched += ["--report-api-errors", "no"]
    command = [*watched, sys.executable, "-m", "tests.sanitizer.programs", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "done" in done.stdout
