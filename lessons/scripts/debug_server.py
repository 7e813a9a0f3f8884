"""PyTorch's debug server (`torch.distributed.debug`) on this machine's loopback, for lesson 13.

`start_debug_server` has no argument for the address, and listens on every interface. It has two halves: a
small server in each rank, which hands out what the rank knows, and a website on rank 0, which asks the ranks
and shows the answers. Here both are started one by one. The names used for that are private to torch and may
change.
"""

import importlib.util
import inspect
import os
import sys
import types
import urllib.error
import urllib.request
from http.server import ThreadingHTTPServer


def why_not():
    """Why there is no debug server with this torch; empty where there is one."""
    try:
        from torch.distributed import debug
        from torch.distributed.debug import _frontend, _store

        needed = debug.start_debug_server, debug._WorkerServer, _store.tcpstore_client
        needed += _frontend.FrontendServer, _frontend._IPv6HTTPServer
        unknown = {"port", "start_method"} - set(inspect.signature(needed[0]).parameters)
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    if unknown:
        return f"its start_debug_server has no {', '.join(sorted(unknown))}"
    if not any(map(importlib.util.find_spec, ("aiohttp", "requests"))):
        return "its website asks the ranks by aiohttp or requests, and neither is installed"
    return ""


def stand_in_for_tabulate():
    """The website draws its tables with the package tabulate; without it, the website does not even start."""
    try:
        import tabulate  # noqa: F401
    except ImportError:
        module = types.ModuleType("tabulate")
        module.tabulate = lambda rows, **options: "\n".join(map(str, rows))
        sys.modules["tabulate"] = module


class OnLoopback(ThreadingHTTPServer):
    """The website's server, on loopback whatever address it is given."""

    def __init__(self, address, handler):
        super().__init__(("127.0.0.1", address[1]), handler)


def serve_on_loopback():
    """Start this rank's server, and on rank 0 the website; returns what keeps them alive, and its address."""
    stand_in_for_tabulate()
    from torch.distributed.debug import _frontend, _store
    from torch.distributed.debug import _WorkerServer as RankServer

    rank, store = int(os.environ["RANK"]), _store.tcpstore_client()
    server = RankServer("127.0.0.1", 0)  # port 0: the system chooses a free one
    store.set(f"rank{rank}", f"http://127.0.0.1:{server.port}")
    if rank != 0:
        return server, None
    _frontend._IPv6HTTPServer = OnLoopback
    website = _frontend.FrontendServer(port=0)
    return (server, website), f"http://127.0.0.1:{website._server.server_port}"


def page(address, seconds=10):
    """What a browser would get there: the status, and the text."""
    try:
        with urllib.request.urlopen(address, timeout=seconds) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, str(error.reason)
