"""Start a JupyterLab for a test, and a Chromium to look at it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import wait_for

CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

LIMIT = 600_000  # milliseconds to wait for anything on a page: a busy machine is slow

SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false"},
    "notebook-extension/tracker": {"windowingMode": "none"},  # a page also contains the cells out of sight
}


class Lab:
    """A running server: its address, its token, and the folder it shows."""

    def __init__(self, folder: Path, home: Path, course_home: Path) -> None:
        self.folder, self.token = folder, secrets.token_hex(16)
        for name, chosen in SETTINGS.items():
            file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(chosen))
        places = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        environment = {**os.environ, **{name: str(home / place) for name, place in places.items()}}
        environment |= {"COURSE_HOME": str(course_home), "JUPYTER_PREFER_ENV_PATH": "1"}
        self.log = home / "server.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
                    "--ServerApp.ip=127.0.0.1",
                    f"--ServerApp.port={20000 + secrets.randbelow(20000)}",
                    f"--IdentityProvider.token={self.token}",
                    f"--ServerApp.root_dir={folder}",
                ],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        info = home / "runtime" / f"jpserver-{self.process.pid}.json"
        self.url = json.loads(wait_for(lambda: info.exists() and info.read_text(), what="the server"))["url"]
        wait_for(self._answers, what="the server's answer")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}api?token={self.token}", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def connected(self, path: str) -> bool:
        """Return whether a notebook has an idle kernel with a page connected to it."""
        with urllib.request.urlopen(f"{self.url}api/sessions?token={self.token}", timeout=5) as answer:
            kernels = [each["kernel"] for each in json.load(answer) if each["path"] == path]
        return any(each["connections"] and each["execution_state"] == "idle" for each in kernels)

    def close(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for process in psutil.wait_procs(family, timeout=30)[1]:
            process.kill()


@contextlib.contextmanager
def fresh_page(chromium: str, folder: Path, height: int = 900) -> Iterator[Any]:
    """Open a page in a Chromium with an empty profile, which it keeps in the folder."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(folder),
            executable_path=chromium,
            headless=True,
            viewport={"width": 1280, "height": height},
            args=CHROMIUM_ARGUMENTS,
        )
        context.set_default_timeout(LIMIT)  # also for clicks and pages to load: Playwright's 30 s are short
        try:
            yield context.pages[0] if context.pages else context.new_page()
        finally:
            context.close()


class Notebook:
    """A notebook that is open in the browser."""

    IDLE = '.jp-NotebookPanel-toolbar .jp-Notebook-ExecutionIndicator[data-status="idle"]'

    def __init__(self, page: Any, lab: Lab, path: str) -> None:
        self.page = page
        page.goto(f"{lab.url}lab/tree/{path}?reset&token={lab.token}")
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        wait_for(lambda: lab.connected(path), what="a kernel that the page is connected to")
        page.wait_for_selector(self.IDLE)

    def run_all(self) -> None:
        self.page.click("#jp-MainMenu >> text=Run")
        self.page.click('.lm-Menu-item[data-command="runmenu:run-all"]')
        select, begun = self.page.locator(".jp-Dialog .jp-mod-accept"), self.page.locator(".jp-InputPrompt")

        def has_begun() -> bool:
            if select.count():  # a page that does not know its kernel yet asks for one
                select.click()
            return any(text not in ("", "[ ]:") for text in begun.all_inner_texts())

        wait_for(has_begun, LIMIT / 1000, "the first cell to be run")

    def save(self) -> None:
        self.page.click('.jp-NotebookPanel-toolbar [data-command="docmanager:save"]')
        self.page.wait_for_selector(".jp-NotebookPanel-toolbar")

    def interrupt(self) -> None:
        self.page.click('.jp-NotebookPanel-toolbar [data-command="notebook:interrupt-kernel"]')

    def wait_idle(self, seconds: float) -> None:
        self.page.wait_for_selector(self.IDLE, timeout=seconds * 1000)
