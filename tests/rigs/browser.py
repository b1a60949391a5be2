"""A real browser without a window, driven by selenium, for tests of pages."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from selenium.common.exceptions import WebDriverException
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.pointer_actions import PointerActions
from selenium.webdriver.support.wait import WebDriverWait

from kvpipe.testing.waiting import WAIT_S

DRIVER, CHROMIUM = "/usr/bin/chromedriver", "/usr/bin/chromium"
STARTS_MAX = 3
"""The largest number of starts. On a busy machine a browser sometimes ends during its start."""
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


class BrowserMissingError(RuntimeError):
    """This error means that no browser is installed."""


class Browser:
    """One browser with an empty profile. Leaving the context ends all of its processes.

    A command that the browser refuses raises `WebDriverException`.
    """

    def __init__(self, *, dark: bool = False) -> None:
        """`dark`: the browser prefers the dark colour scheme."""
        self._dark = dark
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start the driver on a free port, and then the browser. If the browser ends at once, start it again."""
        for program, package in ((DRIVER, "chromium-driver"), (CHROMIUM, "chromium")):
            if shutil.which(program) is None:
                msg = f"{program} is missing: apt-get install chromium chromium-driver ({package} has it)"
                raise BrowserMissingError(msg)
        for _ in range(STARTS_MAX - 1):
            with contextlib.suppress(WebDriverException):
                return self._start()
        return self._start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End the browser and its driver."""
        self._stack.close()

    def _start(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._profile = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            service = ChromeService(
                DRIVER,
                env=os.environ | {"HOME": str(self._profile), "TMPDIR": str(self._profile)},
                popen_kw={"start_new_session": True},
            )
            stack.callback(_kill, service)
            self._page = Chrome(self._options(), service)
            stack.callback(self._page.quit)
            self._prepare()
            self._stack = stack.pop_all()
        return self

    def _options(self) -> ChromeOptions:
        options = ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--window-size={WINDOW[0]},{WINDOW[1]}", f"--user-data-dir={self._profile / 'profile'}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        return options

    def _prepare(self) -> None:
        size = {"width": WINDOW[0], "height": WINDOW[1], "deviceScaleFactor": 1, "mobile": False}
        self._page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self._page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.open("about:blank")
        self.requested()  # forgets the request that the browser made for a new window's own page
        self.complaints()

    # ---- driving a page ---------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Load a page, and wait until it is loaded."""
        self._page.get(url)

    def run(self, script: str, *args: object) -> Any:
        """Run the body of a function in the page, and return its result."""
        return self._page.execute_script(script, *args)

    def wait_for(self, script: str, *args: object) -> Any:
        """Run `script` until its result is true, and return the result."""
        return WebDriverWait(self._page, WAIT_S, 0.02).until(lambda _: self.run(script, *args), script)

    def screenshot(self, width: float = WINDOW[0], height: float = WINDOW[1], scale: float = 1) -> bytes:
        """Return the page's first `width` x `height` pixels, of `scale` x `scale` each, as a PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        shot = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        return base64.b64decode(self._page.execute_cdp_cmd("Page.captureScreenshot", shot)["data"])

    def click(self, x: float, y: float) -> None:
        """Click at a place of the window."""
        with self._pointer(x, y) as pointer:
            pointer.click()

    def hover(self, x: float, y: float) -> None:
        """Move the pointer to a place of the window."""
        with self._pointer(x, y):
            pass

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Press the button at a place, move the pointer, and release the button."""
        with self._pointer(x, y) as pointer:
            pointer.pointer_down().move_to_location(round(to_x), round(to_y)).pointer_up()

    @contextlib.contextmanager
    def _pointer(self, x: float, y: float) -> Iterator[PointerActions]:
        """Yield actions of the pointer, beginning with a move to a place of the window."""
        actions = ActionBuilder(self._page, duration=0)
        yield actions.pointer_action.move_to_location(round(x), round(y))
        actions.perform()

    def wheel(self, x: float, y: float, down: int) -> None:
        """Turn the wheel at a place of the window."""
        actions = ActionBuilder(self._page, duration=0)
        actions.wheel_action.scroll(round(x), round(y), 0, down, 0, "viewport")
        actions.perform()

    def press(self, keys: Sequence[str]) -> None:
        """Press keys, one after the other."""
        ActionChains(self._page, duration=0).send_keys(*keys).perform()

    # ---- logs -------------------------------------------------------------------------------------------------------

    def complaints(self) -> list[str]:
        """Return the console's lines since the last call. Errors and refused requests are included."""
        return [f"{entry['level']}: {entry['message']}" for entry in self._page.get_log("browser")]

    def requested(self) -> list[str]:
        """Return the addresses that were requested since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self._page.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def _kill(service: ChromeService) -> None:
    """End the driver, and all remaining processes of the browser."""
    if (driver := getattr(service, "process", None)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait(WAIT_S)
