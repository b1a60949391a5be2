"""A real browser without a window, driven over the W3C WebDriver protocol with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvpipe.testing.waiting import WAIT_S

DRIVER, CHROMIUM = "/usr/bin/chromedriver", "/usr/bin/chromium"
STARTS_MAX = 3
"""On a busy machine it ends now and then before it has begun."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
)
WINDOW = (1280, 800)
ENTER = "\ue007"


class BrowserMissingError(RuntimeError):
    """There is no browser here."""


class BrowserError(RuntimeError):
    """The browser refused a command."""


class Browser:
    """One browser with an empty profile. Leaving the context ends all of its processes."""

    def __init__(self, *, dark: bool = False) -> None:
        """`dark`: it prefers the dark colour scheme."""
        self._dark = dark
        self._stack = contextlib.ExitStack()
        self._session = ""

    def __enter__(self) -> Self:
        """Start the driver on a free port, and the browser; if one ends at once, another."""
        for program, package in ((DRIVER, "chromium-driver"), (CHROMIUM, "chromium")):
            if shutil.which(program) is None:
                msg = f"{program} is missing: apt-get install chromium chromium-driver ({package} has it)"
                raise BrowserMissingError(msg)
        for _ in range(STARTS_MAX - 1):
            with contextlib.suppress(BrowserError):
                return self._start()
        return self._start()

    def _start(self) -> Self:
        self._session = ""
        with contextlib.ExitStack() as stack:
            self._profile = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            self._url = f"http://127.0.0.1:{stack.enter_context(self._driver())}"
            self._open()
            stack.callback(self._quit)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End them."""
        self._stack.close()

    @contextlib.contextmanager
    def _driver(self) -> Iterator[int]:
        """Run the driver; yield its port."""
        log = self._profile / "driver.log"
        with log.open("wb") as sink:
            driver = subprocess.Popen(
                [DRIVER, "--port=0"], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
                env=os.environ | {"HOME": str(self._profile), "TMPDIR": str(self._profile)},
            )  # fmt: skip
        try:
            yield self._port(log, driver)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)  # the driver, and whatever of the browser is left
            driver.wait(WAIT_S)

    @staticmethod
    def _port(log: Path, driver: subprocess.Popen[bytes]) -> int:
        message, before = "", "started successfully on port "
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until and driver.poll() is None:
            message = log.read_text(errors="replace")
            if before in message:
                return int(message.split(before)[1].split(".")[0].split()[0])
            time.sleep(0.02)
        msg = f"chromedriver did not start: {message}"
        raise BrowserError(msg)

    def _open(self) -> None:
        flags = [*FLAGS, f"--window-size={WINDOW[0]},{WINDOW[1]}", f"--user-data-dir={self._profile / 'profile'}"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": flags},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self._session = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        size = {"width": WINDOW[0], "height": WINDOW[1], "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.open("about:blank")
        self.requested()  # forgets the page that a new window shows
        self.complaints()

    def _quit(self) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self._call("DELETE", "")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"{self._url}/session" + (f"/{self._session}" if self._session else "") + path
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)  # noqa: S310
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=WAIT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as e:
            with e:
                raise BrowserError(e.read().decode(errors="replace")[:2000]) from None

    def _devtools(self, command: str, params: dict[str, Any]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    # ---- driving a page ---------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Load a page, and wait until it is there."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *args: object) -> Any:
        """Run the body of a function in the page; return what it returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def wait_for(self, script: str, *args: object) -> Any:
        """Run `script` until it returns something true; return that."""
        until = time.monotonic() + WAIT_S
        while not (value := self.run(script, *args)):
            if time.monotonic() > until:
                msg = f"{script} is still {value!r} after {WAIT_S} s"
                raise BrowserError(msg)
            time.sleep(0.02)
        return value

    def screenshot(self, width: float = WINDOW[0], height: float = WINDOW[1], scale: float = 1) -> bytes:
        """Return the page's first `width` x `height` pixels, of `scale` x `scale` each, as a PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        shot = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        return base64.b64decode(self._devtools("Page.captureScreenshot", shot)["data"])

    def click(self, x: float, y: float) -> None:
        """Click at a place of the window."""
        self._pointer([self._to(x, y), {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}])

    def hover(self, x: float, y: float) -> None:
        """Move the pointer to a place of the window."""
        self._pointer([self._to(x, y)])

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Press the button, move, release it."""
        down, up = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
        self._pointer([self._to(x, y), down, self._to(to_x, to_y), up])

    def wheel(self, x: float, y: float, down: int) -> None:
        """Turn the wheel at a place of the window."""
        turn = {"type": "scroll", "x": round(x), "y": round(y), "deltaX": 0, "deltaY": down, "duration": 0}
        self._actions({"type": "wheel", "id": "wheel", "actions": [turn]})

    def press(self, keys: Sequence[str]) -> None:
        """Press keys, one after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._actions({"type": "key", "id": "keyboard", "actions": actions})

    @staticmethod
    def _to(x: float, y: float) -> dict[str, object]:
        return {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"}

    def _pointer(self, actions: list[dict[str, object]]) -> None:
        self._actions(
            {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions},
        )

    def _actions(self, source: dict[str, object]) -> None:
        self._call("POST", "/actions", {"actions": [source]})

    # ---- logs -------------------------------------------------------------------------------------------------------

    def complaints(self) -> list[str]:
        """Return what the page has written to the console since the last call; errors and refusals are there too."""
        return [f"{entry['level']}: {entry['message']}" for entry in self._log("browser")]

    def requested(self) -> list[str]:
        """Return the addresses that were requested since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def _log(self, kind: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._call("POST", "/se/log", {"type": kind})
        return entries
