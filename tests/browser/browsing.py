"""A headless Chromium, a server for a folder, JupyterLab, and a look at what a page shows."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_CALM = {"NO_MKDOCS_2_WARNING": "1"}
_LEGIBLE = Path(__file__).with_name("legible.js").read_text()
# what may be wider than its place, because it scrolls, and what is no prose
_SCROLLS = (
    "pre, .drawing, .notebook-output, .md-typeset__scrollwrap, .jp-OutputArea-output, .md-clipboard, [style*=overflow]"
)


def chromium() -> str | None:
    """The path of a Chromium, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A browser with an empty profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium(), args=list(_SWITCHES))
        try:
            yield running
        finally:
            running.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder, for the time of the context."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def built_site(folder: Path) -> Path:
    """The documentation, built into a folder with warnings as errors.

    Raises:
        RuntimeError: it cannot be built.
    """
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **_CALM})
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return folder


@contextlib.contextmanager
def jupyterlab(folder: Path, notebooks: tuple[str, ...]) -> Iterator[Any]:
    """JupyterLab over copies of notebooks; yields a function from a notebook's name to the address that opens it."""
    for name in notebooks:
        shutil.copy(ROOT / "notebooks" / name, folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = folder / ".config" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}')
    token = secrets.token_hex(16)
    places = {f"JUPYTER_{kind}_DIR": str(folder / f".{kind.lower()}") for kind in ("CONFIG", "DATA", "RUNTIME")}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += [f"--ServerApp.port={port}", f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}"]
    command.append("--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate")
    with (folder / ".log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **places, "HOME": str(folder), "PYTHONPATH": path}
        )
        try:
            _await(port, server)
            # a workspace of its own each time, without the tabs of the one before
            home = f"http://127.0.0.1:{port}/lab/workspaces"
            yield lambda name: f"{home}/{secrets.token_hex(4)}/tree/{name}?token={token}"
        finally:
            server.terminate()
            server.wait()


def _await(port: int, server: subprocess.Popen[bytes], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError("JupyterLab stopped")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise RuntimeError("JupyterLab did not start")


_IDLE = """() => {
    const panel = jupyterapp.shell.currentWidget;
    const cells = [...panel.content.widgets].filter((cell) => cell.model.type === "code");
    return panel.sessionContext.session?.kernel?.status === "idle" && cells.every((cell) => cell.model.executionCount);
}"""


def run_notebook(page: Any, address: str, *, dark: bool) -> None:
    """Open a notebook, choose a theme, and run all of its cells."""
    page.goto(address)
    page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell")
    page.wait_for_function("() => jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'")
    theme = f"JupyterLab {'Dark' if dark else 'Light'}"
    page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
    page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{str(not dark).lower()}'")
    page.evaluate(
        """() => {
        const panel = jupyterapp.shell.currentWidget;
        panel.content.widgets.forEach((cell) => cell.model.type === "code" && (cell.model.executionCount = null));
        jupyterapp.commands.execute("notebook:run-all-cells");
    }"""
    )
    page.wait_for_function(_IDLE, timeout=120_000)


def wrong(page: Any, selector: str) -> list[str]:
    """What is wrong with how the parts of a page look that a selector finds, and with the width of the page."""
    limits = {"size": 8.8, "contrast": 4.5, "scrolls": _SCROLLS}
    parts = page.query_selector_all(selector)
    found = [] if parts else [f"nothing is shown for {selector}"]
    for part in parts:
        found += page.evaluate(f"([root, limits]) => ({_LEGIBLE.rstrip().rstrip(';')})(root, limits)", [part, limits])
    wide, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    return [*found, *([f"the page is {wide} px wide in {room}"] if wide > room else [])]
