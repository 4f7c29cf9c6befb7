"""Pages in a real browser, without a window: what they have become, and what was said on the console."""

from __future__ import annotations

import contextlib
import functools
import http.server
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def opened(address: str, folder: Path, width: int = 1200, *, seconds: float = 3.0) -> tuple[str, str]:
    """A page after `seconds` of its own time, and the lines of the console; skips where there is no browser."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--window-size={width},900", f"--virtual-time-budget={int(1000 * seconds)}"]
    command += ["--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"]
    for attempt in range(3):  # a browser that does not start, or hangs, is no fault of the page
        profile = folder / f"profile-{width}-{attempt}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [*command, f"--user-data-dir={profile}", address], capture_output=True, text=True, timeout=90
            )
            if "</html>" in done.stdout:
                return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    pytest.skip(f"{CHROMIUM} shows no page on this machine")


class Answers(http.server.SimpleHTTPRequestHandler):
    """A server of files that keeps what pages send to it."""

    received: queue.Queue[str]

    def do_POST(self) -> None:
        self.received.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, queue.Queue[str]]]:
    """The address of a folder while it is served, and what pages have sent by POST."""
    received: queue.Queue[str] = queue.Queue()
    handler = functools.partial(type("Handler", (Answers,), {"received": received}), directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


def answered(
    address: str, received: queue.Queue[str], folder: Path, width: int = 1200, *, seconds: float = 300.0
) -> tuple[str, str]:
    """What a page has sent to its server in real time, and the console: for pages that take a while."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--no-first-run"]
    command += [f"--window-size={width},900", "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}"]
    command += ["--disable-dev-shm-usage", "--disable-background-networking"]
    with (folder / "console.txt").open("w") as log, subprocess.Popen([*command, address], stderr=log) as browser:
        try:
            text = received.get(timeout=seconds)
        except queue.Empty:
            pytest.fail(f"the page did not answer in {seconds:g} s; {(folder / 'console.txt').read_text()[-1000:]}")
        finally:
            browser.terminate()
    said = (folder / "console.txt").read_text(errors="replace").splitlines()
    return text, "\n".join(line for line in said if "CONSOLE" in line)


def shown(html: str, folder: Path, width: int = 1200) -> tuple[str, str]:
    """The same for the text of a page."""
    file = folder / "page.html"
    file.write_text(html, encoding="utf-8")
    return opened(f"file://{file}", folder, width)
