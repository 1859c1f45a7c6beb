"""Markdown reports of analyses as HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote
from xml.etree.ElementTree import Element

import markdown
import markupsafe
from markdown.inlinepatterns import InlineProcessor
from markdown.treeprocessors import Treeprocessor

from common.errors import shortened
from common.files import read_bytes
from common.tables import with_minus

MAX_DOCUMENT = 1_000_000  # characters of a Markdown file
MAX_MARKS, MAX_ALL_MARKS = 150, 50_000  # characters such as [ in a block, and in all blocks


def render_markdown(document: Path, link: Callable[[Path], str]) -> markupsafe.Markup:
    """Convert a Markdown file of an analysis to HTML.

    The file contains names chosen by users. Therefore, embedded HTML is shown as text, except for
    line breaks and anchors. Links are converted by ``link``; links and images with a
    scheme, such as ``https:``, are shown as text. A document whose conversion could take long is
    shown as it is.

    Args:
        document: the Markdown file.
        link: function from the resolved path of a linked file to its URL on the page, unquoted.

    Raises:
        UserError: if it is not a regular file.
    """
    text = read_bytes(document).decode(errors="replace")
    if not _is_simple(text):
        return markupsafe.Markup("<pre>{}</pre>").format(shortened(text, MAX_DOCUMENT))
    reader = markdown.Markdown(extensions=["tables"])
    reader.preprocessors.deregister("html_block")
    for name in ("html", "autolink", "automail"):
        reader.inlinePatterns.deregister(name)
    reader.inlinePatterns.register(_OwnMarkup(_OwnMarkup.PATTERN, reader), "own markup", 90)
    reader.treeprocessors.register(_Links(document, link), "links", 1)
    reader.treeprocessors.register(_Minus(), "minus", 0)
    return markupsafe.Markup(reader.convert(text))


def _is_simple(text: str) -> bool:
    """Return whether a Markdown text can be converted quickly. The time grows with the cube of the
    number of marks in a block, which is a paragraph or a row of a table."""
    marks = 0
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        is_table = len(lines) > 1 and all(line.startswith("|") for line in lines)
        for part in lines if is_table else [block]:
            number = len(re.findall(r"[\[`<>*_]", part))
            marks += number
            if number > MAX_MARKS:
                return False
    return len(text) <= MAX_DOCUMENT and marks <= MAX_ALL_MARKS


class _OwnMarkup(InlineProcessor):
    """Parse the embedded HTML that reports contain: line breaks and anchors."""

    PATTERN = r'<br>|<a id="([a-z0-9_-]+)"></a>'

    def handleMatch(self, m: re.Match, data: str) -> tuple[Element, int, int]:
        element = Element("a", id=m[1]) if m[1] else Element("br")
        return element, m.start(0), m.end(0)


class _Minus(Treeprocessor):
    """Write negative numbers with minus signs, except in code."""

    def run(self, root: Element) -> None:
        for element in root.iter():
            if element.text:
                element.text = _minus(element.text)
            if element.tail:
                element.tail = _minus(element.tail)


def _minus(text: str) -> str:
    # Code is atomic.
    return text if isinstance(text, markdown.util.AtomicString) else with_minus(text)


class _Links(Treeprocessor):
    """Convert links of a document to links of the page that shows it, and external links to text.
    """

    def __init__(self, document: Path, link: Callable[[Path], str]):
        super().__init__()
        self._document, self._link = document, link

    def run(self, root: Element) -> None:
        for element in root.iter():
            name = {"a": "href", "img": "src"}.get(element.tag, "")
            target = element.get(name)
            if target is None:  # an anchor without a link
                continue
            address = self._moved(html.unescape(target))
            if address is not None:
                element.set(name, address)
                continue
            element.text = element.get("alt") or element.text
            element.tag = "span"
            element.attrib.clear()

    def _moved(self, address: str) -> str | None:
        """Convert a link of the document to a link of the page that shows the document.

        The result is None unless the link is an anchor or a relative path.
        """
        if address.startswith("#"):
            return address
        path = unquote(address.partition("#")[0])
        if not re.fullmatch(r"[\w .-]+(/[\w .-]+)*", path):  # no scheme, no host, no root
            return None
        target = (self._document.parent / path).resolve()
        return quote(self._link(target)) + address[len(address.partition("#")[0]):]
