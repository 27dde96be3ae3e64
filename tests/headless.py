"""A browser for the tests of pages."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest


@contextmanager
def chromium(*arguments: str):
    """An installed Chromium, headless, with these arguments. Skips the test if there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if not found:
        pytest.skip(f"no browser here: none of {', '.join(names)}")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=found, args=["--no-sandbox", *arguments])
        yield browser
        browser.close()
