"""A headless Chromium that opens a page and accepts no error, no request and no sideways scroll.

A test takes the fixture `browser` and calls `browser.open_page(path)`.
"""

import os
import shutil
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

PROGRAMS = "chromium", "chromium-browser", "google-chrome"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
HEIGHT = 900


class Browser:
    """Opens pages, and remembers what went wrong in them until `check` asks."""

    def __init__(self, chromium):
        self._chromium = chromium
        self._contexts: list = []
        self.faults: list[str] = []

    def open_page(self, place: Path | str, width: int = 1440, scheme: str = "light"):
        """A page that has been loaded, from a file or a URL, in a window of `width` pixels.

        From now on, every console error or warning, every failed request, and every request to
        another host than the page's own (for a file: to anywhere) fails the test at its end.
        """
        url = place if isinstance(place, str) else place.resolve().as_uri()
        context = self._chromium.new_context(
            viewport={"width": width, "height": HEIGHT},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", self._note_console)
        page.on("pageerror", lambda error: self.faults.append(f"error in a script: {error}"))
        page.on("requestfailed", lambda request: self.faults.append(f"failed: {request.url[:200]}"))
        page.on("request", lambda request: self._note_request(request.url, url))
        page.goto(url)
        return page

    def _note_console(self, message) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console {message.type}: {message.text}")

    def _note_request(self, url: str, of_page: str) -> None:
        inside = url.startswith(("data:", "blob:")) or url.split("#")[0] == of_page.split("#")[0]
        host = urlsplit(of_page).netloc
        if not inside and not (host and urlsplit(url).netloc == host):
            self.faults.append(f"a request left the page: {url[:200]}")

    def close_pages(self) -> list[str]:
        """Close all pages, and return and forget what went wrong in them."""
        for context in self._contexts:
            context.close()
        faults, self.faults, self._contexts = self.faults, [], []
        return faults


@contextmanager
def running_browser():
    """A Chromium. Skips where there is none, except in continuous integration, whose runs are to
    open every page."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if not program or not find_spec("playwright"):
        must_run = os.environ.get("CI") == "true" and sys.platform == "linux"
        needed = f"playwright, which is in the extra `dev`, and one of {', '.join(PROGRAMS)}"
        (pytest.fail if must_run else pytest.skip)(f"a page needs {needed}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield Browser(chromium)
        chromium.close()


def serious_findings(page) -> list[str]:
    """What axe says of a page, as far as it is serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    findings = []
    for violation in Axe().run(page).response["violations"]:
        if violation["impact"] in ("serious", "critical"):
            places = [node["html"][:200] for node in violation["nodes"][:3]]
            findings.append(f"{violation['id']}: {violation['help']}: {places}")
    return findings


def scrolls_sideways(page) -> bool:
    """Whether the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")
