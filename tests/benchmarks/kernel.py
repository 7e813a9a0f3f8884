"""A real Jupyter kernel that runs cells, and the environment that all contenders share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from course_lib.hardware import cores

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANKS = 2
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
CELL_SECONDS = 600


def environment(folder: Path) -> dict[str, str]:
    """Return everyone's environment: this checkout, a separate home, and what `launch` sets for its ranks."""
    path = [str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "COURSE_HOME": str(folder / "home"),
        "IPYTHONDIR": str(folder / "ipython"),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(max(1, cores() // RANKS)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def output_of(command: Sequence[str], folder: Path) -> str:
    """Run a program in that environment and return what it prints."""
    run = subprocess.run(command, env=environment(folder), capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")
    return run.stdout


class Kernel:
    """A kernel of this Python."""

    def __init__(self, folder: Path) -> None:
        # a spec of its own, so that none of the user's or the machine's is used instead
        spec = folder / "kernels" / "measured" / "kernel.json"
        spec.parent.mkdir(parents=True, exist_ok=True)
        spec.write_text(json.dumps(get_kernel_dict()))
        specs = KernelSpecManager(kernel_dirs=[str(spec.parents[1])], ensure_native_kernel=False)
        self._manager = KernelManager(
            kernel_name=spec.parent.name, kernel_spec_manager=specs, transport_encryption="auto"
        )
        self._manager.start_kernel(env=environment(folder))
        self._client = self._manager.client()
        self._client.start_channels()
        try:
            self._client.wait_for_ready(timeout=CELL_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def run(self, code: str) -> str:
        """Run a cell and return what it prints."""
        printed: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                printed.append(message["content"]["text"])

        reply = self._client.execute_interactive(code, output_hook=hook, timeout=CELL_SECONDS)
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"]["traceback"]))
        return "".join(printed)

    def value(self, code: str) -> Any:
        """Run a cell and return the last line that it prints, read as JSON."""
        return json.loads(self.run(code).splitlines()[-1])
