"""`bench train --large` and `bench memory`: the cases of the graph engine."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from onelaunch.bench.run import select
from onelaunch.cli.app import make_app


def test_large_networks_are_registered():
    names = [one.name for one in select("train") if one.name.startswith("train/large/")]
    assert names == [
        "train/large/784-2048-2048-2048-10/32", "train/large/784-1024-1024-1024-10/4096",
        "train/large/64-64-64-16/262144", "train/large/784-8192-8192-8192-10/32",
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases would run")
@pytest.mark.parametrize(("what", "count"), [(["train", "--large"], 4), (["memory"], 2)])
def test_gpu_cases_are_skipped_without_a_gpu(what, count, tmp_path):
    result = CliRunner().invoke(make_app(), ["bench", *what, "--quick", "--out", str(tmp_path / "results.json")])
    assert result.exit_code == 0, result.output
    assert f"{count} cases skipped: this machine has no CUDA device" in result.output
