"""Chromium, driven over its debugging pipe: one process for all tests of a module.

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
import time
from collections import deque
from collections.abc import Callable
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
        self.downloads = scratch / "downloads"
        self._events: deque[dict[str, Any]] = deque()
        self._numbers = itertools.count(1)
        self._rest = b""
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                script,
                "bash",
                executable,
                *_FLAGS,
                f"--user-data-dir={scratch / 'me'}",
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)

    def __enter__(self) -> Self:
        behavior = {"behavior": "allow", "downloadPath": str(self.downloads)}
        self.call("Browser.setDownloadBehavior", {**behavior, "eventsEnabled": True})
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._write)  # Chromium ends with its pipe
        os.close(self._read)
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def page(self) -> Page:
        """Open a tab."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        return Page(self, target, session["sessionId"])

    def call(
        self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """Send a command and return its result.

        Raises: RuntimeError with the browser's words if it refuses.
        """
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters or {}}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._take(lambda each: each.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def wait_for(self, method: str, session: str | None = None, **fields: object) -> dict[str, Any]:
        """Return the parameters of the first event of a method, also of one that came already."""

        def is_wanted(each: dict[str, Any]) -> bool:
            known = each.get("params", {})
            return (
                each.get("method") == method
                and session in (None, each.get("sessionId"))
                and all(known.get(name) == value for name, value in fields.items())
            )

        parameters: dict[str, Any] = self._take(is_wanted)["params"]
        return parameters

    def events(self, method: str, session: str) -> list[dict[str, Any]]:
        """Return the parameters of the events of a method so far."""
        self.call("Browser.getVersion")  # whatever was sent before is read after this
        alike = [each for each in self._events if each.get("method") == method]
        return [each["params"] for each in alike if each.get("sessionId") == session]

    def _take(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        for known in self._events:
            if is_wanted(known):
                self._events.remove(known)
                return known
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            message = self._receive(deadline_s)
            if is_wanted(message):
                return message
            self._events.append(message)

    def _receive(self, deadline_s: float) -> dict[str, Any]:
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

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(1280, 1700)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command for this tab."""
        return self._browser.call(method, parameters, self._session)

    def open(self, url: str) -> None:
        """Load a page and run its scripts."""
        self.call("Page.navigate", url=url)
        self._browser.wait_for("Page.loadEventFired", self._session)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=False)
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def prefer(self, scheme: str) -> None:
        """Prefer a color scheme: `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is waited for.

        Raises: RuntimeError with the script's error.
        """
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]["exception"].get("description")))
        return answer["result"].get("value")

    def words(self, selector: str) -> str:
        """Return the visible text of an element, with single spaces."""
        text: str = self.ask(f"document.querySelector({selector!r}).innerText")
        return " ".join(text.split())

    def all(self, selector: str, value: str) -> list[Any]:
        """Return a value of every element that a selector finds, e.g. `textContent`."""
        found = f"[...document.querySelectorAll({selector!r})]"
        values: list[Any] = self.ask(f"{found}.map((one) => one.{value})")
        return values

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        """Move, press or release the mouse."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **options)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press at one point and release at another."""
        left = {"button": "left", "clickCount": 1}
        self.mouse("Moved", *start)
        self.mouse("Pressed", *start, **left)
        self.mouse("Moved", *end, buttons=1, button="left")
        self.mouse("Released", *end, **left)

    def double_click(self, x: float, y: float) -> None:
        """Click twice at a point."""
        for count in (1, 2):
            for kind in ("Pressed", "Released"):
                self.mouse(kind, x, y, button="left", clickCount=count)

    def press(self, key: str) -> None:
        """Press and release a key that the focused element gets."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        self.ask(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = self.box(selector)
        self.drag(*(((box["x"] + box["width"] / 2, box["y"] + box["height"] / 2),) * 2))

    def box(self, selector: str) -> dict[str, float]:
        """Return x, y, width and height of an element in the window."""
        box: dict[str, float] = self.ask(
            f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()"
        )
        return box

    def download(self, selector: str) -> str:
        """Click an element and return the text of the file that it saves."""
        self.click(selector)
        begun = self._browser.wait_for("Browser.downloadWillBegin")
        done = {"guid": begun["guid"], "state": "completed"}
        self._browser.wait_for("Browser.downloadProgress", **done)
        saved = self._browser.downloads / begun["suggestedFilename"]
        text = saved.read_text(encoding="utf-8")
        saved.unlink()
        return text

    def picture(self, *, is_whole: bool = False) -> bytes:
        """Return a PNG of the window, or of the whole page."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=is_whole)
        return base64.b64decode(answer["data"])

    def messages(self) -> list[str]:
        """Return what the console shows: messages, warnings and errors that were not caught."""
        told = self._browser.events("Runtime.consoleAPICalled", self._session)
        raised = self._browser.events("Runtime.exceptionThrown", self._session)
        logged = self._browser.events("Log.entryAdded", self._session)
        return [json.dumps(each) for each in (*told, *raised, *logged)]

    def requests(self) -> set[str]:
        """Return the addresses that the page asked for, beyond data of its own."""
        sent = self._browser.events("Network.requestWillBeSent", self._session)
        urls = {each["request"]["url"] for each in sent}
        return {url for url in urls if not url.startswith(("data:", "blob:"))}

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("Target.closeTarget", {"targetId": self._target})
