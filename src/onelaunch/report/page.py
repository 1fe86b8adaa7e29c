"""The page: one HTML file that needs no network. Its only script sorts tables; without it the page shows the same."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

from onelaunch.report.figure import Section
from onelaunch.report.theme import page_style
from onelaunch.version import VERSION

SORT = """\
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
    const key = row => row.cells[column].dataset.key, text = row => row.cells[column].textContent;
    const compare = (a, b) => key(a) === "" || key(b) === "" ? (key(a) === "") - (key(b) === "")
      : down * (key(a) - key(b) || text(a).localeCompare(text(b)));
    body.append(...[...body.rows].sort(compare));
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down < 0 ? "descending" : "ascending");
  }));
}
"""
# Whatever names the page holds, a browser fetches nothing, and runs nothing but SORT.
SORT_HASH = base64.b64encode(hashlib.sha256(SORT.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{SORT_HASH}'"

BARS = (
    " Whiskers of a benchmark are its quartiles; others, and bands, run from the smallest to the largest value. Unless a "
    "figure says otherwise, shorter bars are better, and a factor beside a bar is its time divided by onelaunch's (by that of "
    "the fastest engine where several ran)."
)


def page(drawn: Sequence[tuple[Section, str]], command: str, left_out: Sequence[str] = ()) -> str:
    """The whole page. `drawn` is each section and its HTML; `left_out` says which inputs could not be drawn."""
    sections = [section for section, _ in drawn]
    title = "onelaunch report" if len(sections) != 1 else f"{sections[0].title} – onelaunch report"
    links = "".join(f'<li><a href="#{s.identity}">{escape(s.title)}</a></li>' for s in sections)
    navigation = f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if len(sections) > 1 else ""
    script = f"<script>{SORT}</script>" if any(table.keys for s in sections for table in s.tables) else ""
    bars = BARS if any('class="whisker"' in html for _, html in drawn) else ""
    missing = "".join(f'<p class="bad">Left out: {escape(words)}</p>' for words in left_out)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="color-scheme" content="light dark">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{page_style()}</style></head><body>'
        '<a class="skip" href="#content">Skip to the results</a>'
        f"<header><h1>onelaunch report</h1>{navigation}{missing}</header>"
        f'<main id="content" tabindex="-1">{"".join(html for _, html in drawn)}</main>'
        f"<footer><p>onelaunch {escape(VERSION)}. This page is made by <code>{escape(command)}</code>.{bars}</p></footer>"
        f"{script}</body></html>\n"
    )
