"""Every script in examples/ runs with `--quick` and writes its picture."""

from __future__ import annotations

import runpy
import sys

import matplotlib.pyplot as plt
import pytest

from tests.conftest import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_it_runs_and_draws(script, tmp_path, monkeypatch, one_thread):
    if script.stem == "replace_grid_search":
        pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--quick"])
    plt.switch_backend("agg")
    runpy.run_path(str(script), run_name="__main__")
    plt.close("all")
    assert (tmp_path / f"{script.stem}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_it_is_short(script):
    assert 40 <= len(script.read_text(encoding="utf-8").splitlines()) <= 100
