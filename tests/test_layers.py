"""Imports go down only: the layers of the design, walked file by file, lazy imports included."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "src" / "onelaunch"
# Bottom row first. A room imports rooms of lower rows and itself; rooms of one row do not know each other.
ROWS = [
    {"capture", "errors", "files", "format", "integers", "version"},
    {"code_cache", "device", "graph_times", "rng"},
    {"activations", "optimizers"},
    {"nvrtc"},
    {"kernels"},
    {"ops", "data"},
    {"fuse", "run", "nn"},
    {"engines"},
    {"train"},
    {"bench", "report"},
    {"cli"},
    {"__init__", "__main__"},
]
HEIGHT = {room: height for height, row in enumerate(ROWS) for room in row}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(module: str) -> set[str]:
    """The modules of this package that a file imports anywhere, functions and type-checking blocks included."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return {name for name in found if name in MODULES}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module):
    here = room_of(module)
    for target in imports_of(module):
        there = room_of(target)
        assert there == here or HEIGHT[there] < HEIGHT[here], f"{module} imports {target}"


def test_no_cycles():
    graph = {
        module: {target for target in imports_of(module) if not type_checking_only(module, target)} - {module}
        for module in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()


def type_checking_only(module: str, target: str) -> bool:
    """Whether `target` is imported for annotations alone, which is no dependency when the program runs."""
    tree = ast.parse(MODULES[module].read_text())
    guarded = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and isinstance(branch.test, ast.Name) and branch.test.id == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == target]
    return bool(nodes) and all(id(node) in guarded for node in nodes)


def test_the_walk_sees_an_upward_edge(tmp_path: Path):
    source = "def f():\n    from onelaunch.train.fit import fit\n    return fit\n"
    path = tmp_path / "bad.py"
    path.write_text(source)
    MODULES["onelaunch.rng.bad"] = path
    try:
        with pytest.raises(AssertionError, match=r"imports onelaunch\.train\.fit"):
            test_imports_go_down("onelaunch.rng.bad")
    finally:
        del MODULES["onelaunch.rng.bad"]
