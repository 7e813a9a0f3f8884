"""A kernel that runs cells, and the environment that all contenders share."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from course_lib.host.hardware import cores
from tests.support.front_end import FrontEnd

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANKS = 2
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")


def environment(folder: Path) -> dict[str, str]:
    """Return everyone's environment: this checkout, a separate home, and what `launch` sets for its ranks."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "COURSE_HOME": str(folder / "home"),
        "IPYTHONDIR": str(folder / "ipython"),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(max(1, cores() // RANKS)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


class Kernel(FrontEnd):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "home", **environment(folder))

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def value(self, code: str) -> Any:
        """Run a cell and return the last line that it prints, read as JSON."""
        printed = self.run(code)
        try:
            return json.loads(printed.splitlines()[-1])
        except ValueError:
            raise RuntimeError(printed) from None
