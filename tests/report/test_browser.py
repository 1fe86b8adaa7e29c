"""The page in a real browser: it loads without errors, fits a phone, follows the system's colours, and prints."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from onelaunch.report.write import write_report
from tests.report.conftest import EPOCHS

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)"),
    pytest.mark.timeout(120),
]


@pytest.fixture
def browse(tmp_path):
    def run(page: Path, *flags: str) -> str:
        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri(),
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert result.returncode == 0, result.stderr
        complaints = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
        assert complaints == []
        return result.stdout

    return run


def brightness(png: Path, x: int, y: int) -> int:
    """The brightness of a pixel, from 0 to 255."""
    from PIL import Image

    with Image.open(png) as image:
        return image.convert("L").tobytes()[y * image.width + x]


def test_it_loads_without_errors_and_draws_every_figure(page, browse):
    dom = browse(page, "--dump-dom")
    assert dom.count("<svg") == page.read_text().count("<svg") > 8
    assert "parsererror" not in dom


def measured(page: Path, browse, width: int, tmp_path: Path) -> dict[str, int]:
    """How a browser of `width` pixels lays the page out, reported by a script that is added to a copy of the page."""
    script = (
        "<script>addEventListener('load',()=>{const all=s=>[...document.querySelectorAll(s)],box=e=>e.getBoundingClientRect();"
        "all('details').forEach(d=>d.open=true);"
        "const type=all('svg text').map(t=>parseFloat(getComputedStyle(t).fontSize)*t.getScreenCTM().a);"
        "const wide=all('.scroll').filter(s=>s.scrollWidth>s.clientWidth);wide.forEach(s=>s.scrollLeft=9999);"
        "const moved=wide.filter(s=>Math.abs(box(s.querySelector('tbody th')).left-box(s).left)>1);"
        "document.title=[document.documentElement.scrollWidth,Math.min(...all('svg').map(s=>box(s).width)),"
        "all('[tabindex=\"0\"],summary,a').length,10*Math.min(...type),10*Math.max(...type),wide.length,moved.length]"
        ".map(Math.round).join(' ')})</script>"
    )
    frame = tmp_path / "frame.html"
    copy = tmp_path / "copy.html"
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    copy.write_text(html.replace("</body>", f"{script}</body>"))
    # Headless windows have a minimum width; a frame has none.
    frame.write_text(
        f'<iframe id=f src="copy.html" style="width:{width}px;height:800px;border:0"></iframe>'
        "<script>f.onload=()=>setTimeout(()=>document.body.append('RESULT '+f.contentDocument.title+' END'),50)</script>"
    )
    dom = browse(frame, "--allow-file-access-from-files", "--virtual-time-budget=2000", "--dump-dom")
    found = re.search(r"RESULT ([\d ]+) END", dom)
    assert found, dom[-500:]
    names = ("page", "narrowest figure", "reachable", "smallest type", "largest type", "wide tables", "moved row heads")
    return dict(zip(names, map(int, found[1].split()), strict=True))


@pytest.mark.parametrize("width", [360, 390, 1200])
def test_it_fits_its_screen(page, browse, width, tmp_path):
    found = measured(page, browse, width, tmp_path)
    assert found["page"] <= width, "the page scrolls sideways"
    assert found["narrowest figure"] >= 300, "too small to read"
    assert found["reachable"] > 15
    assert found["smallest type"] >= 110, "tenths of a pixel: too small to read"
    assert found["largest type"] <= 160, "larger than the text around it"
    assert found["wide tables"] > 0 or width > 400
    assert found["moved row heads"] == 0, "a row is scrolled away from its name"


@pytest.mark.parametrize(("scheme", "bright"), [(1, True), (0, False)], ids=["light", "dark"])
def test_it_follows_the_colours_of_the_system(page, browse, scheme, bright, tmp_path):
    shot = tmp_path / "shot.png"
    browse(page, "--window-size=900,600", f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={shot}")
    assert (brightness(shot, 5, 5) > 200) == bright


def test_it_prints(page, browse, tmp_path):
    pdf = tmp_path / "page.pdf"
    browse(page, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    assert pdf.read_bytes().startswith(b"%PDF")
    assert pdf.stat().st_size > 20_000


def test_a_click_on_a_heading_sorts_the_leaderboard(browse, tmp_path):
    """In the page as it is written, with its policy: the test's script runs in the frame around it."""
    for name, lr in (("a", 0.1), ("b", 0.3), ("c", 0.2)):
        run = tmp_path / name
        run.mkdir()
        (run / "metrics.jsonl").write_text(json.dumps(EPOCHS[0]) + "\n")
        (run / "config.toml").write_text(f"lr = {lr}\n")
    write_report([tmp_path / name for name in "abc"], tmp_path / "page.html")
    frame = tmp_path / "frame.html"
    frame.write_text(
        '<iframe id=f src="page.html"></iframe><script>f.onload=()=>{const d=f.contentDocument,said=[];'
        "const heads=[...d.querySelectorAll('th button')],lr=heads.find(b=>b.textContent==='lr');"
        "const order=()=>[...d.querySelectorAll('table[data-sortable] tbody th')].map(e=>e.textContent).join('');"
        "for(const b of [null,lr,lr]){b&&b.click();said.push(order())}"
        "document.body.append('RESULT '+said.join(' ')+' '+lr.parentNode.getAttribute('aria-sort')+' END')}</script>"
    )
    dom = browse(frame, "--allow-file-access-from-files", "--virtual-time-budget=2000", "--dump-dom")
    assert "RESULT abc bca acb ascending END" in dom
