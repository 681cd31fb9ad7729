"""Chromium, driven over its debugging pipe: one process for all tests of a module.

`python -m tests.integration.browser REPORT.html PICTURE.webp` takes the pictures of the documents.

Source of the protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"),
    "--remote-debugging-pipe",
)
_TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running Chromium; a context manager that ends it."""

    def __init__(self, executable: str, scratch: Path) -> None:
        self.events: list[dict[str, Any]] = []
        """Everything that it told and nobody asked for."""
        self._numbers = itertools.count(1)
        self._rest = b""
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", executable, *_FLAGS, f"--user-data-dir={scratch}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._write)  # Chromium ends with its pipe
        os.close(self._read)
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def page(self, url: str) -> Page:
        """Open an address in a tab, and run the page's scripts."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        return Page(self, session["sessionId"], url)

    def call(
        self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """Send a command and return its result; raise RuntimeError if it is refused."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters or {}}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], deadline_s - time.monotonic())
            if not ready or not (read := os.read(self._read, 1 << 20)):
                raise TimeoutError("the browser does not answer")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


class Page:
    """A tab of a browser."""

    def __init__(self, browser: Browser, session: str, url: str) -> None:
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": 1280, "height": 1700, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=False)
        self.call("Page.navigate", url=url)
        self.ask(
            "new Promise((done) => document.readyState === 'complete' && location.href !=="
            " 'about:blank' ? done() : window.addEventListener('load', done))"
        )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def words(self, selector: str) -> str:
        return " ".join(self.ask(f"document.querySelector({selector!r}).innerText").split())

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **options)

    def drag(self, start: tuple[float, float], end: tuple[float, float], clicks: int = 1) -> None:
        """Press at one point and release at another."""
        left = {"button": "left", "clickCount": clicks}
        self.mouse("Moved", *start)
        self.mouse("Pressed", *start, **left)
        self.mouse("Moved", *end, buttons=1, button="left")
        self.mouse("Released", *end, **left)

    def told(self, *methods: str) -> list[dict[str, Any]]:
        """Return the parameters of the events of some methods so far."""
        self.call("Runtime.evaluate", expression="0")  # whatever was sent before is read by now
        mine = [each for each in self._browser.events if each.get("sessionId") == self._session]
        return [each["params"] for each in mine if each["method"] in methods]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch, Browser(NAMES[0], Path(scratch)) as chromium:
        page = chromium.page(Path(sys.argv[1]).resolve().as_uri())
        size = {"width": 1000, "height": 640, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.ask("new Promise((done) => setTimeout(done, 500))")  # the charts follow the size
        taken = page.call("Page.captureScreenshot", format="webp", quality=38)["data"]
        Path(sys.argv[2]).write_bytes(base64.b64decode(taken))
