"""Headless Chromium for tests, benchmarks and screenshots of the project's pages."""

from __future__ import annotations

import contextlib
import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SHOWN = "main[aria-busy='false']"  # selector of a page that has loaded and drawn its view


def chromium() -> str | None:
    """Return the path of the browser for tests of web pages, or None if none is installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """Yield a headless browser with a new, empty profile."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        yield browser
        browser.close()


@contextlib.contextmanager
def opened_page(browser: Browser, address: str, **context: Any) -> Iterator[Page]:
    """Yield a page in a new browser context, once its view is loaded and drawn.

    Args:
        address: URL of the page.
        context: arguments of Playwright's ``new_context``, such as viewport or colour scheme.

    Raises:
        AssertionError: if the page reported errors by the end of the block.
    """
    pages = browser.new_context(**context)
    page = pages.new_page()
    page.set_default_timeout(300_000)  # milliseconds; slow machines need more than the usual 30 s
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text)
            if message.type == "error" else None)
    page.goto(address)
    page.wait_for_selector(SHOWN)
    yield page
    pages.close()
    assert not problems, problems


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Request handler that does not log requests."""

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a new local web server during the block; yield its URL."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
