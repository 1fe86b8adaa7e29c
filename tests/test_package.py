"""The wheel and the source distribution: what they hold, and that the wheel works in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from onelaunch.shipped import copy_shipped, find_config, shipped_files
from onelaunch.version import VERSION
from tests.conftest import ROOT

TRAIN = """
import onelaunch as ol, torch
from torch import nn
print(ol.__file__)
model = nn.Linear(4, 2)
print(ol.fit(model, torch.randn(40, 4), torch.randint(2, (40,)), epochs=1, progress=False).engine)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions, made from a copy of the files that git knows, as `make dist` makes them."""
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "dist"))
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("this is not a git checkout")
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_distributions_hold_every_file_that_is_read_at_run_time(built: Path) -> None:
    wheel, source = built / f"onelaunch-{VERSION}-py3-none-any.whl", built / f"onelaunch-{VERSION}.tar.gz"
    names = zipfile.ZipFile(wheel).namelist()
    package = [path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "onelaunch").rglob("*")]
    kept = [name for name in package if name.endswith((".py", ".cuh", ".html", ".css", ".js", "py.typed"))]
    assert set(kept) <= set(names)
    assert all(any(name.endswith(f"share/onelaunch/{one}") for name in names) for one in shipped_files())
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    with tarfile.open(source) as archive:
        inside = archive.getnames()
    assert all(f"onelaunch-{VERSION}/{one}" in inside for one in (*shipped_files(), "LICENSE", "README.md"))


def test_the_wheel_works_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment: installing torch again would take minutes."""
    venv.create(tmp_path / "venv", symlinks=os.name != "nt")
    folder = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python = folder / "python"
    wheel = next(built.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    inside = next((tmp_path / "venv").rglob("site-packages"))
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (inside / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    found, engine = run(str(python), "-c", TRAIN).splitlines()
    assert Path(found).is_relative_to(tmp_path)
    assert engine in ("cpu", "eager", "graph", "resident")
    assert run(str(folder / "onelaunch"), "--version") == f"onelaunch {VERSION}\n"
    run(str(folder / "onelaunch"), "examples", "copied")
    assert (tmp_path / "copied" / "configs" / "default.toml").read_text() == (ROOT / "configs/default.toml").read_text()
    small = ("--data", "digits", "--hidden", "8", "--steps", "3", "--out", "run")
    run(str(folder / "onelaunch"), "train", "classic-784", *small)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_shipped_configurations_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(Path("classic-784")) == find_config(Path("configs/classic-784.toml"))
    assert find_config(Path("classic-784")).is_file()
    Path("classic-784").write_text("epochs = 1")
    assert find_config(Path("classic-784")) == Path("classic-784")  # the user's own file comes first
    assert find_config(Path("missing.toml")) == Path("missing.toml")


def test_copies_replace_nothing(tmp_path: Path) -> None:
    copied = copy_shipped(tmp_path)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in copied) == sorted(shipped_files())
    with pytest.raises(ValueError, match=r"already has .*: pass another folder"):
        copy_shipped(tmp_path)
