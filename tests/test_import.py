"""`import onelaunch` leaves heavy packages alone, and `fit` imports no compiler before the first step."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
modules = [sorted(sys.modules)]
import onelaunch
modules.append(sorted(sys.modules))
import onelaunch.train.fit, onelaunch.engines.eager.session
modules.append(sorted(sys.modules))
print(json.dumps(modules))
"""
HEAVY = {
    "triton", "matplotlib", "pydantic", "typer", "pooch", "sklearn", "pandas", "mlxtend", "llvmlite", "cuda", "jax",
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> list[set[str]]:
    """The modules that are loaded after importing torch, then onelaunch, then `fit` with the eager engine."""
    return [set(names) for names in json.loads(subprocess.check_output([sys.executable, "-c", SCRIPT]))]


def test_import_is_light(loaded):
    after_torch, after_onelaunch, _ = loaded
    assert not {name.split(".")[0] for name in after_onelaunch - after_torch} & HEAVY


def test_fit_and_its_engines_import_no_compiler(loaded):
    """PyTorch does at its first optimizer step. But Triton's tests must set its interpreter mode before its import."""
    assert not {"triton", "torch._dynamo"} & loaded[2]
