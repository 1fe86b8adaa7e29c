"""The import of PyTorch's databases changes nothing for other tests, and needs no package that PyTorch does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.databases import load

PROGRAM = """
import os, random, sys
sys.modules["expecttest"] = None  # as where it is not installed
import torch, torch._inductor.config, torch.utils.cpp_extension  # these set paths and variables of their own
from tests.databases.load import load

def settings():
    return {
        "environment": dict(os.environ), "path": list(sys.path), "arguments": list(sys.argv), "random": random.getstate(),
        "torch's random": torch.get_rng_state().tolist(), "type": torch.get_default_dtype(),
        "flags": torch.backends.flags_frozen(),
        "scripts": (torch._C.ScriptFunction.__call__, torch._C.ScriptMethod.__call__),
    }

before = settings()
assert len(load("modules", "module_db")) > 100
assert len(load("optimizers", "optim_db")) > 10
changed = [name for name, value in settings().items() if value != before[name]]
assert not changed, changed
assert sys.modules["expecttest"] is None
assert not torch.cuda.is_initialized()
"""


def test_the_import_leaves_no_trace_and_does_without_expecttest() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_flags_of_backends_can_be_set() -> None:
    load.load("modules", "module_db")
    assert not torch.backends.flags_frozen()


@pytest.mark.parametrize(("module", "name"), [("modules", "no_db"), ("none", "module_db")])
def test_without_the_database_tests_are_skipped_with_the_reason(module: str, name: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"PyTorch's database {name} cannot be imported: .*{module}"):
        load.load(module, name)
