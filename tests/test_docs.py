"""The documentation site builds without a warning, needs no network, and shows every public name; its code runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import onelaunch as ol
from tests.cli.conftest import invoke
from tests.conftest import ROOT

DOCS = ROOT / "docs"
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
TUTORIALS = sorted(path for path in (DOCS / "tutorials").glob("*.md") if path.name != "index.md")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOADED = re.compile(
    r"""<(?:script|img|source|iframe|link(?! rel="(?:prev|next|canonical)"))\b[^>]*?(?:src|href)="?(https?:|//)"""
)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings", reason="needs onelaunch[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


def test_the_site_builds_and_its_pages_load_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    assert [page.name for page in pages if LOADED.search(page.read_text(encoding="utf-8"))] == []
    styles = "".join(sheet.read_text(encoding="utf-8") for sheet in site.rglob("*.css"))
    assert re.findall(r"url\((?![\"']?data:)[\"']?(?:https?:|//)[^)]*", styles) == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_search_works_in_pages_that_are_opened_from_files(site, tmp_path):
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=8000",
        f"--user-data-dir={tmp_path}", "--dump-dom", f"{(site / 'api' / 'ops.html').as_uri()}?q=dropout",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert re.search(r"\d+ matching documents", done.stdout)


def test_files_outside_docs_are_in_the_site(site):
    recordings = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert {path.name for path in (site / "recordings").iterdir()} == recordings
    assert 'href="recordings/' in (site / "results.html").read_text(encoding="utf-8")
    assert "best alternative" in (site / "index.html").read_text(encoding="utf-8")
    assert (site / "contributing.html").is_file()


def test_parameters_are_shown_as_a_list(site):
    text = (site / "api" / "training.html").read_text(encoding="utf-8")
    assert re.search(r"<li>\s*(?:<p>)?<code>schedule</code>: ", text)


def test_every_public_name_has_an_entry(site):
    shown = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    estimators = import_module("onelaunch.sklearn").__all__
    names = [f"ol.{name}" for name in ol.__all__ if name not in ("nn", "__version__")]
    names += [f"ol.nn.{name}" for name in ol.nn.__all__] + [f"onelaunch.sklearn.{name}" for name in estimators]
    assert [name for name in names if f'heading: "{name}"' not in shown] == []


@pytest.mark.parametrize(("page", "written"), [("quick-start.md", "curves.png"), ("sweep.md", "sweep.html")])
def test_the_code_of_a_page_runs(page, written, tmp_path, monkeypatch, one_thread):
    backend = import_module("onelaunch.fuse.backend")  # `onelaunch.fuse` is also the function
    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "the test compiles nothing")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = python_blocks(DOCS / page)
    assert len(blocks) > 1
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert (tmp_path / written).is_file()


def test_the_code_for_tables_runs(tmp_path, monkeypatch, one_thread):
    pandas = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    frame = pandas.DataFrame({"size": random.lognormal(4, 0.5, 200), "zip": random.integers(0, 3, 200)})
    y = np.where(frame["size"] > 55, "large", "small")
    frame.assign(target=y).to_csv("new.csv", index=False)
    assert invoke("train", "--data", "new.csv", "--epochs", "2", "--out", "run", "--no-progress").code == 0
    names: dict[str, object] = {
        "ol": ol, "frame": frame, "new_frame": frame, "X": frame, "X_new": frame, "y": y,
        "price": 1000 * frame["size"] * random.lognormal(0, 0.2, 200),
    }  # fmt: skip
    blocks = python_blocks(DOCS / "tables.md")
    assert any("TransformedTargetRegressor" in block for block in blocks)
    for block in blocks:
        exec(compile(block, "tables.md", "exec"), names)


def test_the_tables_on_which_a_peer_may_be_faster_are_those_of_the_results():
    results = (DOCS / "results.md").read_text(encoding="utf-8")
    lower = re.findall(r"^\| tabular/(.*?) \|.*\| (≈ )?[\d.]+× its time \|$", results, re.MULTILINE)
    page = " ".join((DOCS / "tables.md").read_text(encoding="utf-8").split())
    found = re.search(r"median time is lower than ours on (.*?), but the spreads are too large to tell", page)
    assert found, "say on which tables a peer has a lower median"
    assert sorted(found[1].split(" and ")) == sorted(name for name, _ in lower)
    assert all(noisy for _, noisy in lower), "a peer is faster beyond the spreads: say so in tables.md"


def test_every_tutorial_shows_a_script_and_its_picture():
    """The scripts themselves are run by test_examples.py."""
    shown = []
    for page in TUTORIALS:
        included = [re.fullmatch(r'--8<-- "examples/(.*)"\n', block) for block in python_blocks(page)]
        assert len(included) == 1
        assert included[0], f"{page.name} has code that no test runs"
        shown.append(included[0][1])
        picture = DOCS / "tutorials" / included[0][1].replace(".py", ".png")
        assert f"]({picture.name})" in page.read_text(encoding="utf-8")
        assert picture.stat().st_size < 100_000
    assert sorted(shown) == EXAMPLES
