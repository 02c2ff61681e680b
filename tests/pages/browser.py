"""Drive a headless Chromium through its debugging pipe: two pipes, and JSON between zero bytes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 60.0
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions "
    "--disable-background-networking --disable-component-update --disable-sync --remote-debugging-pipe about:blank"
)
# The program's end of the pipes has to have these numbers.
_TO, _FROM = 3, 4


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """Hold a browser with one tab.

    Attributes:
        events: What it has told by itself, by method and parameters, in order.
    """

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers, self._rest = to, answers, b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something; return the answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT
        while True:
            answer = self._read(until)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def wait_for(self, method: str) -> None:
        """Wait until it has told this."""
        until = time.monotonic() + TIMEOUT
        while not any(name == method for name, _ in self.events):
            self._read(until)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = until - time.monotonic()
            assert left > 0 and wait([self._answers], left), "the browser does not answer"
            got = os.read(self._answers, 1 << 20)
            assert got, "the browser has ended"
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message

    def open(self, path: Any, width: int = 1000, height: int = 800, dark: bool = False) -> None:
        """Show a file."""
        self.visit(f"file://{path}", width, height, dark)

    def visit(self, url: str, width: int = 1000, height: int = 800, dark: bool = False) -> None:
        """Show an address."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            "End": 35,
            "Home": 36,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                text = {"text": "\r"} if (kind, key) == ("rawKeyDown", "Enter") else {}
                kind = "keyDown" if text else kind
                self.call(
                    "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text
                )

    def type(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def click(self, element: str) -> None:
        """Click the middle of an element, given by an expression."""
        box = self.run(
            f"(e => (e.scrollIntoView(), (({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(e.getBoundingClientRect())))({element})"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)


@contextlib.contextmanager
def running(program: str) -> Iterator[Browser]:
    """Give a browser for the time of a block."""
    theirs_in, to = os.pipe()
    answers, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, contextlib.ExitStack() as stack:
        # A shell gives the ends of the pipes the numbers that the browser looks for.
        command = f'exec "$0" "$@" {_TO}<&{theirs_in} {_FROM}>&{theirs_out}'
        process = subprocess.Popen(
            ["/bin/bash", "-c", command, program, *_FLAGS.split(), f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(process.wait, TIMEOUT)
        stack.callback(process.kill)
        for end in (theirs_in, theirs_out):
            os.close(end)
        for end in (to, answers):
            stack.callback(os.close, end)
        yield Browser(to, answers)
