"""Imports go down the layer diagram of CONTRIBUTING.md, from which this test reads the rows, and never in a circle."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "src" / "onelaunch"
Modules = Mapping[str, Path]


def package_modules() -> dict[str, Path]:
    """The path of every module of the package, by its dotted name."""
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }


def diagram_rows() -> list[set[str]]:
    """The rows of the diagram, bottom row first: folders and files of the package, without their descriptions."""
    diagram = (ROOT / "CONTRIBUTING.md").read_text().split("**Layers.**", 1)[1].split("```")[1]
    return [set(line.split("#")[0].split()) for line in reversed(diagram.strip().splitlines())]


def room_of(module: str) -> str:
    """The folder or file of the package that `module` belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@functools.cache
def import_statements(path: Path) -> list[tuple[str, str]]:
    """(module, name) of every import in a file, in functions and type-checking blocks too; no name for `import module`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found += [(str(node.module), alias.name) for alias in node.names]
    return found


def imports_of(module: str, modules: Modules) -> set[str]:
    """The other modules of this package that a module imports."""
    found = {
        f"{source}.{name}" if f"{source}.{name}" in modules else source
        for source, name in import_statements(modules[module])
    }
    return (found & modules.keys()) - {module}


def violations(modules: Modules) -> Iterator[str]:
    """Imports that do not go down, and files that the diagram does not show or shows wrongly."""
    height = {room: height for height, row in enumerate(diagram_rows()) for room in row}
    rooms = {room_of(module) for module in modules}
    yield from (f"{room} is missing in the diagram" for room in rooms - height.keys())
    yield from (f"{room} is in the diagram only" for room in height.keys() - rooms)
    for module in modules:
        for target in imports_of(module, modules):
            above, below = room_of(module), room_of(target)
            if above != below and height.get(above, 0) <= height.get(below, 0):
                yield f"{module} imports {target}"


def test_imports_go_down():
    assert sorted(violations(package_modules())) == []


def test_no_cycles():
    """An import for annotations alone counts: two files that name each other's types are one file."""
    modules = package_modules()
    graphlib.TopologicalSorter({module: imports_of(module, modules) for module in modules}).prepare()


def test_test_files_import_no_test_files():
    """What tests share is in a file without the prefix test_. The tests of fuse, an older part, still break this rule."""
    found = [
        f"{path.relative_to(ROOT)} imports {source}"
        for path in (ROOT / "tests").rglob("*.py")
        if "fuse" not in path.parts
        for source, name in import_statements(path)
        if source.startswith("tests.") and (source.split(".")[-1].startswith("test_") or name.startswith("test_"))
    ]
    assert sorted(found) == []


def test_an_upward_import_and_a_file_outside_the_diagram_are_found(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from onelaunch.train.fit import fit\n    return fit\n")
    modules = package_modules() | {"onelaunch.rng.bad": bad, "onelaunch.utils": bad}
    found = set(violations(modules))
    assert {"onelaunch.rng.bad imports onelaunch.train.fit", "utils is missing in the diagram"} <= found
