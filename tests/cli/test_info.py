"""`onelaunch info`."""

from __future__ import annotations

import re

import onelaunch
from onelaunch.engines import FASTEST_FIRST


def test_info_names_versions_devices_and_every_engine(cli):
    result = cli("info")
    assert result.code == 0
    assert f"onelaunch        {onelaunch.__version__}" in result.out
    for engine in FASTEST_FIRST:
        line = next(line for line in result.out.splitlines() if line.startswith(f"engine {engine} "))
        assert re.search(r"(yes|no: .+); needs .+", line)
        assert "the model is on" not in line
