"""A real browser without a window, and a server for it to talk to: uvicorn in a thread of this process.

    with serving(app) as server, browser(profile) as chromium:
        chromium.get(server.url)

Needs Debian's chromium and its driver, or any others on the PATH.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "hide-scrollbars",
)


@dataclass
class Serving:
    url: str
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    def cut(self) -> None:
        """Break off every connection, in the middle of whatever it carries."""
        for connection in list(self.server.server_state.connections):
            self.loop.call_soon_threadsafe(connection.transport.abort)


@contextmanager
def serving(app: Any) -> Iterator[Serving]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve([listener]),))
    thread.start()
    try:
        yield Serving(f"http://127.0.0.1:{listener.getsockname()[1]}/", server, loop)
    finally:
        server.should_exit = True
        thread.join()
        loop.close()


@contextmanager
def browser(profile: Any, width: int = 900, height: int = 1000, dark: bool = False) -> Iterator[Any]:
    """profile: an empty directory of its own."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"user-data-dir={profile}", f"window-size={width},{height}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield driver
    finally:
        driver.quit()
