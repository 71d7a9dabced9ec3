"""A real headless Chromium, for tests of pages."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def browser_program() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def lacking(packages: Iterable[str]) -> str | None:
    """What these tests need and do not find."""
    for package in packages:
        if find_spec(package) is None:
            return f"{package} is not installed: pip install 'celery-toc[test-flower]'"
    if browser_program() is None:
        return "no Chromium: apt-get install chromium chromium-driver"
    if shutil.which("chromedriver") is None:
        return "no chromedriver: apt-get install chromium-driver"
    return None


def require_browser(*packages: str) -> None:
    """Skip the test that has no browser, or fail it where one is required.

    packages: what it needs beside selenium
    """
    what = lacking((*packages, "selenium"))
    if what is not None and os.environ.get("TOC_TEST_FLOWER") == "required":
        pytest.fail(what, pytrace=False)
    if what is not None:
        pytest.skip(what)


class Browser:
    """One browser, whose sessions are its own."""

    def __init__(self, profile: Path, size: str = "1400,1000") -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = browser_program()
        for argument in (
            "--headless=new",
            "--no-sandbox",  # it cannot have one where it is run by root
            "--disable-dev-shm-usage",
            f"--window-size={size}",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)

    def close(self) -> None:
        self.driver.quit()

    def open(self, url: str, then: str = "", at: str = "body") -> str:
        """Load a page; what it shows there, as soon as that has the text `then`."""
        self.driver.get(url)
        return self.wait_text(then, at) if then else ""

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str = "body") -> str:
        found: str = self.run(
            "const one = document.querySelector(arguments[0]); return one ? one.innerText : ''",
            selector,
        )
        return found

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def press(self, text: str, within: str = "body", then: str = "", at: str = "body") -> str:
        """Click the button or link with this text, as soon as it is there.

        then: a text that is waited for afterwards; what is shown at that place is returned
        """
        self._click(
            lambda: self.run(
                "return [...document.querySelectorAll(`${arguments[0]} button, "
                "${arguments[0]} a, ${arguments[0]} summary`)]"
                ".find(one => one.innerText.trim() === arguments[1])",
                within,
                text,
            ),
            f"{text!r} in {within}",
        )
        return self.wait_text(then, at) if then else ""

    def click(self, selector: str) -> None:
        """Click what is there, as soon as it is."""
        self._click(lambda: self.find(selector), selector)

    def _click(self, find: Callable[[], Any], what: str) -> None:
        from selenium.common.exceptions import (
            ElementClickInterceptedException,
            ElementNotInteractableException,
            NoSuchElementException,
            StaleElementReferenceException,
        )

        deadline = time.monotonic() + 20
        while True:
            try:
                if (found := find()) is not None:
                    self.run("arguments[0].scrollIntoView({block: 'center'})", found)
                    found.click()
                    return
            except (
                ElementClickInterceptedException,
                ElementNotInteractableException,
                NoSuchElementException,
                StaleElementReferenceException,
            ):
                pass  # the page has just changed
            assert time.monotonic() < deadline, f"there is no {what}:\n{self.text()}"
            time.sleep(0.05)

    def type(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def keys(self, text: str) -> None:
        """Press keys, wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(text).perform()

    def wait(self, is_there: Callable[[], Any], seconds: float = 20) -> Any:
        """What is found as soon as it is there; the page is not loaded again."""
        from selenium.common.exceptions import (
            NoSuchElementException,
            StaleElementReferenceException,
        )

        deadline = time.monotonic() + seconds
        while True:
            try:
                found = is_there()
            except (NoSuchElementException, StaleElementReferenceException):
                found = None
            if found:
                return found
            assert time.monotonic() < deadline, f"{self.driver.current_url} shows:\n{self.text()}"
            time.sleep(0.05)

    def wait_text(self, text: str, selector: str = "body") -> str:
        found: str = self.wait(lambda: (said := self.text(selector)) and text in said and said)
        return found

    def complaints(self) -> list[str]:
        """What the browser had to complain of: errors of the script, and of the policy."""
        return [one["message"] for one in self.driver.get_log("browser")]

    def screenshot(self, name: str) -> None:
        """Keep a picture for the docs, if TOC_SCREENS names a folder."""
        folder = os.environ.get("TOC_SCREENS")
        if folder:
            self.driver.save_screenshot(str(Path(folder, f"{name}.png")))
