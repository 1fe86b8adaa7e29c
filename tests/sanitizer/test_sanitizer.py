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
# A cluster by units fetches rows for all of its blocks with one copy. A member waits for each of its copies and then gives up
# the barriers that counted them. racecheck forgets with the barrier that the copies had ended, and warns of the next member's
# first copies. Without `mbarrier.inval` it finds nothing, but the barriers could then not be made again.
FORGOTTEN_COPIES = ("racecheck", "members-cluster-by-units")
OVERWRITTEN_COPY = "Potential WAW hazard detected (invalid async operation synchronization)"


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on the path")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_found(tool, program):
    all_hazards = (tool, program) == FORGOTTEN_COPIES
    watched = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--print-limit",
        str(2000 if all_hazards else 20),
    ]
    if tool == "memcheck":  # the bindings look up driver functions that may not exist, which is no error
        watched += ["--report-api-errors", "no"]
    if all_hazards:
        watched += ["--racecheck-report", "all"]
    command = [*watched, sys.executable, "-m", "tests.sanitizer.programs", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = done.stdout[-4000:] + done.stderr[-2000:]
    if all_hazards:
        assert other_findings(done.stdout) == [], said
    else:
        assert done.returncode == 0, said
    assert "done" in done.stdout


def other_findings(text: str) -> list[str]:
    """racecheck's hazards but the known ones, and its summary if it counts an error or is missing."""
    hazards = [line for line in text.splitlines() if "hazard detected" in line and OVERWRITTEN_COPY not in line]
    summary = next((line for line in text.splitlines() if "RACECHECK SUMMARY" in line), "no summary")
    return hazards + ([] if "(0 errors, " in summary else [summary])
