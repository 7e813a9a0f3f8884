"""A front end of a kernel: it runs cells, moves sliders, clicks buttons, and keeps what is shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel


class FrontEnd:
    """``shown``: the contents of all displays, in order, as updated; ``widgets``: their states, by id."""

    def __init__(self, home: Path, **variables: str) -> None:
        environment = {**os.environ, "COURSE_HOME": str(home), **variables}
        self.manager, self.client = start_new_kernel(env=environment)
        self.shown: list[dict[str, Any]] = []
        self.widgets: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, code: str, cell: str = "one") -> str:
        """Run a cell, with this id if any; return the text that it printed, or the error."""
        return self.outputs(self.send(code, cell))

    def send(self, code: str, cell: str = "one") -> str:
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}}
        metadata = {"cellId": cell} if cell else {}
        return self._send("execute_request", content | {"allow_stdin": False}, metadata)

    def move(self, name: str, value: Any) -> str:
        """Give the last control of this description a value."""
        return self._tell(name, {"method": "update", "state": {"value": value}, "buffer_paths": []})

    def click(self, name: str) -> str:
        return self._tell(name, {"method": "custom", "content": {"event": "click"}})

    def _tell(self, name: str, data: dict[str, Any]) -> str:
        found = [each for each, state in self.widgets.items() if state.get("description") == name]
        return self.outputs(self._send("comm_msg", {"comm_id": found[-1], "data": data}, {}))

    def _send(self, kind: str, content: dict[str, Any], metadata: dict[str, Any]) -> str:
        message = self.client.session.msg(kind, content, metadata=metadata)
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def outputs(self, request: str) -> str:
        """Return what a request has printed once it is done, or the error."""
        text = ""
        while True:
            got = self.client.get_iopub_msg(timeout=300)
            if got["parent_header"].get("msg_id") != request:
                continue
            its = got["content"]
            if got["msg_type"] == "status" and its["execution_state"] == "idle":
                return text
            if got["msg_type"] == "stream":
                text += its["text"]
            elif got["msg_type"] == "error":
                text += f"{its['ename']}: {its['evalue']}"
            elif got["msg_type"] == "comm_open":
                self.widgets[its["comm_id"]] = its["data"]["state"]
            elif got["msg_type"] == "comm_msg" and its["data"]["method"] == "update":
                self.widgets[its["comm_id"]].update(its["data"]["state"])
            elif got["msg_type"] == "display_data":
                self.shown.append(its)
            elif got["msg_type"] == "update_display_data":
                identity = its["transient"]["display_id"]
                self.shown = [
                    its if each.get("transient", {}).get("display_id") == identity else each
                    for each in self.shown
                ]
