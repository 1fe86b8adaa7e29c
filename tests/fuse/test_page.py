"""The page in a real browser: it loads without an error or a request, and its switch changes the totals."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onelaunch as ol
from tests.fuse.models import Mixer, ResNet

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WATCH = "<script>window.errors = []; addEventListener('error', e => errors.push(e.message));</script>"
PLAY = """<script>
const read = () => ["bytes", "launches", "seconds"].map(name => document.getElementById(`total-${name}`).textContent);
const nodes = () => document.querySelectorAll("#picture .node").length;
const result = { fused: read(), fusedNodes: nodes() };
document.getElementById("show-unfused").click();
result.unfused = read(); result.unfusedNodes = nodes();
result.brackets = document.querySelectorAll(".bracket").length;
document.getElementById("show-fused").click();
result.again = read();
document.querySelector("#picture .node:last-child").dispatchEvent(new MouseEvent("mouseenter"));
result.details = document.getElementById("details").textContent;
result.points = document.querySelectorAll("#roofline .point").length;
result.rows = document.querySelectorAll("#groups tr").length;
const loaded = performance.getEntriesByType("resource").map(entry => entry.name);
result.requests = loaded.filter(name => !name.startsWith("data:"));
result.errors = errors;
document.body.dataset.result = JSON.stringify(result);
</script>"""


def played(page: Path) -> dict[str, Any]:
    if BROWSER is None:
        pytest.skip("no browser: install Debian's chromium")
    text = page.read_text()
    page.write_text(text.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{PLAY}</body>"))
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        f"--user-data-dir={page.parent}/profile",
    ]
    dom = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=90, check=True).stdout
    found = re.search(r'data-result="([^"]*)"', dom)
    assert found, dom[-2000:]
    return json.loads(unescape(found[1]))


def test_page_in_a_browser(tmp_path: Path) -> None:
    explained = ol.explain(ResNet(), torch.randn(8, 3, 32, 32))
    result = played(explained.html(tmp_path / "page.html"))
    assert result["errors"] == []
    assert result["requests"] == []
    assert result["fused"] == result["again"]
    assert all(unfused != fused for unfused, fused in zip(result["unfused"], result["fused"], strict=True))
    assert result["unfused"][1] == str(explained.before.launches)
    assert result["fused"][1] == str(explained.after.launches)
    fused = [group for group in explained.groups if group.fused]
    assert result["unfusedNodes"] == len(explained.operations)
    assert result["fusedNodes"] == len(explained.operations) - sum(len(group.operations) - 1 for group in fused)
    assert result["brackets"] == len(fused)
    assert result["rows"] == len(list(explained.rows())) + 1
    assert result["points"] > 5
    assert "linear" in result["details"]


TOLD = """<script>addEventListener("load", () => setTimeout(() => {
const enlarged = ({ a, b }) => Math.hypot(a, b), all = selector => [...document.querySelectorAll(selector)];
const type = all("svg text").map(t => parseFloat(getComputedStyle(t).fontSize) * enlarged(t.getScreenCTM()));
const table = document.querySelector(".scroll");
document.title = JSON.stringify({ type: [Math.min(...type), Math.max(...type)], page: document.documentElement.scrollWidth,
  cut: table.scrollWidth - table.clientWidth, points: all("#roofline .point").length,
  named: all("#roofline .dot").flatMap(t => t.textContent.split(", ")).length });
}, 200));</script>"""


@pytest.mark.parametrize("width", [360, 1000, 1280])
def test_page_fits_its_screen(tmp_path: Path, width: int) -> None:
    if BROWSER is None:
        pytest.skip("no browser: install Debian's chromium")
    page = ol.explain(ResNet(), torch.randn(8, 3, 32, 32)).html(tmp_path / "page.html")
    page.write_text(page.read_text().replace("</body>", f"{TOLD}</body>"))
    frame = tmp_path / "frame.html"  # headless windows have a minimum width; a frame has none
    frame.write_text(
        f'<iframe id=f src="page.html" style="width:{width}px;height:800px;border:0"></iframe>'
        "<script>f.onload=()=>setTimeout(()=>{document.body.dataset.result=f.contentDocument.title},400)</script>"
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--allow-file-access-from-files"]
    flags += ["--virtual-time-budget=2000", f"--user-data-dir={tmp_path}/profile"]
    dom = subprocess.run([BROWSER, *flags, frame.as_uri()], capture_output=True, text=True, timeout=90, check=True)
    found = re.search(r'data-result="([^"]*)"', dom.stdout)
    assert found, dom.stdout[-2000:]
    result = json.loads(unescape(found[1]))
    assert result["page"] <= width
    assert result["cut"] <= 0, "the table does not fit"
    assert result["type"][0] > 11
    assert result["type"][1] < 14
    assert result["named"] == result["points"] > 5


def test_a_name_without_bytes_is_replaced(tmp_path: Path) -> None:
    explained = ol.explain(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4))
    explained.model = "lone \ud800"
    assert "<title>lone ?" in explained.html(tmp_path / "page.html").read_text(encoding="utf-8")


def test_hostile_names_and_nothing_to_fuse(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("</script><script>throw 1</script>", nn.LayerNorm(4))
    result = played(ol.explain(model, torch.randn(3, 4)).html(tmp_path / "page.html"))
    assert result["errors"] == []
    assert result["unfused"] == result["fused"]
    assert "</script><script>throw 1</script>" in result["details"]


def test_the_page_names_no_host(tmp_path: Path) -> None:
    text = (
        ol.explain(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4))
        .html(tmp_path / "page.html")
        .read_text()
    )
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    explained = ol.explain(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written: .*; pass a writable path"):
        explained.html(tmp_path / "file" / "page.html")
    with pytest.raises(ValueError, match=r"cannot be written: .*; pass a writable path"):
        explained.html("null\0.html")


NODE = shutil.which("node") or shutil.which("nodejs")
STAND_IN = """

const box = () => { const one = { style: {}, dataset: {}, children: [], clientWidth: 600, listeners: {}, textContent: "",
  setAttribute() {}, addEventListener(n, f) { this.listeners[n] = f; },
  append(...all) { this.children.push(...all); }, replaceChildren(...all) { this.children = all; } }; return one; };
const elements = {};
globalThis.document = { getElementById: id => elements[id] ||= box(), createElement: box, createElementNS: box };
globalThis.ResizeObserver = class { observe() {} };
"""
ASK = """
const text = one => typeof one === "string" ? one : (one.textContent ?? "") + (one.children || []).map(text).join("|");
const seen = () => [text(elements["total-bytes"]), text(elements["total-launches"])];
const fused = seen(); elements["show-unfused"].listeners.click();
console.log(JSON.stringify({ fused, unfused: seen(), rows: elements.groups.children.map(text), notes: text(elements.notes),
  title: text(elements.title), subtitle: text(elements.subtitle), details: text(elements.details) }));
"""


def test_the_script_of_the_page_reads_the_explanation(tmp_path: Path) -> None:
    """In node.js, with a stand-in for the document: every key that it reads is there, and equal groups are one row."""
    if NODE is None:
        pytest.skip("no node.js")
    explained = ol.explain(Mixer(dropout=0.1), torch.randn(2, 3, 16, 16))
    page = explained.html(tmp_path / "page.html").read_text()
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    program = f"{STAND_IN}document.getElementById('data').textContent = {json.dumps(data)};\n{script}\n{ASK}"
    (tmp_path / "page.js").write_text(program)
    run = subprocess.run([NODE, str(tmp_path / "page.js")], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["unfused"][1] == str(explained.before.launches)
    assert result["fused"][1] == str(explained.after.launches)
    rows = list(explained.rows())
    assert len(result["rows"]) == len(rows) + 1
    counts = [count for count, _ in rows if count > 1]
    assert sum("×" in row for row in result["rows"]) == len(counts) > 0
    assert "onelaunch: " in "".join(result["rows"])
    assert "undefined" not in run.stdout
    assert "NaN" not in run.stdout
