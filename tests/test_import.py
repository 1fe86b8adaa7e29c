"""`import onelaunch` is light: it adds little to `import torch` and leaves heavy packages alone."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys, time
import torch
begin = time.perf_counter()
import onelaunch
print(json.dumps({"seconds": time.perf_counter() - begin, "modules": sorted(sys.modules)}))
"""
HEAVY = (
    "triton",
    "matplotlib",
    "pydantic",
    "typer",
    "pooch",
    "sklearn",
    "pandas",
    "mlxtend",
    "llvmlite",
    "cuda",
    "jax",
)


def test_import_is_light():
    runs = [json.loads(subprocess.check_output([sys.executable, "-c", SCRIPT])) for _ in range(2)]
    assert min(run["seconds"] for run in runs) < 1
    loaded = {name.split(".")[0] for name in runs[0]["modules"]}
    torch_alone = subprocess.check_output([sys.executable, "-c", "import torch, sys; print(*sys.modules)"], text=True)
    loaded -= {name.split(".")[0] for name in torch_alone.split()}
    assert not loaded & set(HEAVY)


def test_fit_and_its_engines_import_no_compiler():
    """PyTorch does at its first optimizer step; but Triton must not be there before its tests say how it shall run."""
    script = "import sys, torch, onelaunch.train.fit, onelaunch.engines.eager.session; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert not {"triton", "torch._dynamo"} & set(loaded)
