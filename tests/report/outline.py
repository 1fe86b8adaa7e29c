"""Reads an HTML page for the tests."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "path", "rect", "img"}


class Outline(HTMLParser):
    """The tags and texts of a page; fails on a tag that is closed out of order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]
