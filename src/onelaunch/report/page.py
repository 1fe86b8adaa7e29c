"""The page: one HTML file that needs neither network nor scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from onelaunch.report.figure import Section
from onelaunch.report.theme import page_style
from onelaunch.version import VERSION

# Whatever names the page holds, a browser fetches and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(drawn: Sequence[tuple[Section, str]], command: str, left_out: Sequence[str] = ()) -> str:
    """The whole page. `drawn` is each section and its HTML; `left_out` says which inputs could not be drawn."""
    sections = [section for section, _ in drawn]
    title = "onelaunch report" if len(sections) != 1 else f"{sections[0].title} – onelaunch report"
    links = "".join(f'<li><a href="#{s.identity}">{escape(s.title)}</a></li>' for s in sections)
    navigation = f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if len(sections) > 1 else ""
    missing = "".join(f'<p class="bad">Left out: {escape(words)}</p>' for words in left_out)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="color-scheme" content="light dark">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{page_style()}</style></head><body>'
        '<a class="skip" href="#content">Skip to the results</a>'
        f"<header><h1>onelaunch report</h1>{navigation}{missing}</header>"
        f'<main id="content" tabindex="-1">{"".join(html for _, html in drawn)}</main>'
        f"<footer><p>onelaunch {escape(VERSION)}. This page is made by <code>{escape(command)}</code>. "
        "Whiskers of a benchmark are its quartiles; others, and bands, run from the smallest to the largest value. Unless a "
        "figure says otherwise, shorter bars are better, and a factor beside a bar is its time divided by onelaunch's (by that "
        "of the fastest engine where several ran).</p></footer></body></html>\n"
    )
