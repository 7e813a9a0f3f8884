"""Submissions that do harm, by a cell and by an answer: none gets points for it, none costs others theirs.

Each is judged beside an honest one, as in a class with ``--jobs 2``, which must get all its points.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import course_lib
from course_lib.exercises.grading import batch, score, session, walls
from course_lib.exercises.grading.score import Score
from tests.exercises.grading.toys import HONEST_FIRST, HONEST_SECOND, check, notebook
from tests.support.line_process import LineProcess
from tests.support.needs import missing
from tests.support.processes import wait_for

HOUSE = Path(course_lib.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One pair of walls for all: what one submission does costs no other anything. One for the neighbour."""
    if reason := walls.unprotected():
        missing(reason)
    places = batch._places(2)
    command = [sys.executable, "-m", "tests.exercises.grading.neighbour", *map(str, places[-1])]
    neighbour = LineProcess(command, str(tmp_path_factory.mktemp("neighbour")), 600.0)
    NEIGHBOURS.append(neighbour)
    assert neighbour.ask({"judge": 1}) == HONEST, "before there are walls here"
    with walls.Walls(places[0]) as there:
        WALLS.append(there)
        yield
        WALLS.clear()
    NEIGHBOURS.clear()
    neighbour.end()


WALLS: list[walls.Walls] = []
NEIGHBOURS: list[LineProcess] = []
HONEST = {"points": [2, 3], "said": []}


@pytest.fixture(autouse=True)
def _walled(questions: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(score, "GRACE_SECONDS", 20.0)
    monkeypatch.setattr(walls, "END_SECONDS", 120.0)  # on a busy machine a hundred processes take long to end
    yield
    # bubblewrap, its first process, and the supervisor
    wait_for(lambda: len(WALLS[0]._family()) <= 3, what="the end of all that the sessions started")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what never comes to an end."""
    monkeypatch.setattr(score, "CELL_SECONDS", 4.0)
    monkeypatch.setattr(score, "ALL_SECONDS", 10.0)
    monkeypatch.setattr(score, "GRACE_SECONDS", 8.0)


@pytest.fixture
def anew() -> Iterator[None]:
    """The limits with which walls begin are those of the test."""
    WALLS[0]._end()
    yield
    WALLS[0]._end()


def score_of(text: bytes, seed: str = "") -> Score:
    """Return a submission's score, and assert that its neighbour, judged again and again, lost nothing."""
    over = threading.Event()

    def beside() -> list[Any]:
        found, ended = [], False
        while not ended:
            begun = time.monotonic()
            found.append(NEIGHBOURS[0].ask({"judge": 1}))
            ended = over.wait(
                4 * (time.monotonic() - begun)
            )  # without a pause, it would take a core from all tests
        return found

    with ThreadPoolExecutor(1) as thread:
        neighbour = thread.submit(beside)
        try:
            found = score.score_notebook(text, "99_toys.ipynb", seed, 60.0, WALLS[0])
        finally:
            over.set()
    assert all(each == HONEST for each in neighbour.result()), neighbour.result()
    return found


def points(scored: Score) -> list[float]:
    return [scored.feedback[f"99.{place}"].points for place in (1, 2)]


def harmed(mischief: str, calls_it: bool = True) -> Score:
    """Of a notebook that does harm in a cell and in its first answer, while its second answer is honest."""
    first = f"{mischief}\ndef first(numbers):\n    return mischief()\n"
    text = notebook(first, "mischief()" if calls_it else "", check(1), HONEST_SECOND, check(2))
    result = score_of(text)
    assert points(result) == [0, 3], result
    return result


def said(scored: Score) -> str:
    """All that was told about the first question."""
    first = scored.feedback["99.1"]
    return "\n".join([*scored.trouble, first.trouble, *(finding.seen for finding in first.findings)])


def test_an_honest_one_gets_its_points() -> None:
    text = notebook(HONEST_FIRST, check(1), HONEST_SECOND, check(2))
    once = score_of(text)
    assert points(once) == [2, 3]
    assert (once.trouble, once.struck) == ([], False)


def test_the_same_input_is_judged_alike() -> None:
    wrong = notebook("def first(numbers):\n    return 0\n", check(1), check(2))
    once = score_of(wrong)
    assert points(once) == [0, 0]
    assert "returned 0, an int" in said(once)
    assert score_of(wrong) == once, "with the same draws, which the feedback shows"
    assert said(score_of(wrong, seed="another seed")) != said(once)


LOOPS = {
    "a loop": "def mischief():\n    while True:\n        pass\n",
    "a loop that hears no signal": """
import signal
def mischief():
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(each, signal.SIG_IGN)
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
""",
}


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", LOOPS)
def test_what_never_ends_is_ended(name: str) -> None:
    first = f"{LOOPS[name]}\ndef first(numbers):\n    return mischief()\n"
    result = score_of(notebook(first, "mischief()", check(1), HONEST_SECOND, check(2)))
    assert points(result) == [0, 3], result
    assert "not done after" in said(result)
    assert result.struck, "it is judged once more"


ENDS = {
    "os._exit": "import os\ndef mischief():\n    os._exit(0)\n",
    "a segfault": "import ctypes\ndef mischief():\n    ctypes.string_at(0)\n",
    "SIGKILL to all": "import os\ndef mischief():\n    os.kill(-1, 9)\n",
}


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_its_process_costs_itself_alone(name: str) -> None:
    result = harmed(ENDS[name])
    if name != "SIGKILL to all":  # which spares the one that sends it
        assert (
            "Cell In[2] was left out, but for what it defines: your code ended the process that runs it"
            in result.trouble
        )
    assert result.feedback["99.1"].trouble


def test_cells_that_end_their_process_cost_no_other_question() -> None:
    """Neither the answers in them nor those below, however many they are."""
    ends = "import os\nos._exit(0)"
    text = notebook(f"{HONEST_FIRST}\n{ends}", check(1), *[ends] * 8, HONEST_SECOND, *[ends] * 8, check(2))
    assert points(score_of(text)) == [2, 3]


def test_a_good_answer_stays_whatever_a_later_start_makes_of_it() -> None:
    """In the last start there is no cell left that calls anything, and so no ``nothing``."""
    first = "nothing = int()\ndef first(numbers):\n    return sum(numbers) + nothing\n"
    result = score_of(notebook(first, check(1), *["import os\nos._exit(0)"] * 6, HONEST_SECOND, check(2)))
    assert points(result) == [2, 3], result
    assert "at the last of 6 starts, only what its cells define was run" in result.trouble


def test_what_lies_beside_the_notebook_is_there_in_its_cells_and_on_ranks() -> None:
    first = (
        "import helper\ndef first(numbers):\n    return helper.total(numbers, open('data/zero.txt').read())\n"
    )
    second = HONEST_SECOND.replace("import torch\n", "import torch, helper\n")
    files = {"helper.py": b"def total(numbers, more):\n    return sum(numbers) + int(more)\n"}
    files["data/zero.txt"] = b"0"
    text = notebook(first, "assert open('data/zero.txt').read() == '0'", check(1), second, check(2))
    assert points(score.score_notebook(text, "99_toys.ipynb", "", 60.0, WALLS[0], files)) == [2, 3]
    assert points(score_of(text)) == [0, 0], "the next one has nothing of it"


def test_100_mb_of_output_are_not_kept() -> None:
    result = harmed(
        "def mischief():\n    for _ in range(100):\n        print('x' * 10**6)\n    return 'done'\n"
    )
    assert len(str(result)) < 10_000
    assert "returned 'done', a str" in said(result)


@pytest.mark.usefixtures("anew", "soon")
def test_a_fork_bomb_has_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walls, "MOST_PROCESSES", 150)
    counted: list[int] = []
    family = walls.Walls._family

    def count(self: walls.Walls) -> set[psutil.Process]:
        """At each look of the walls' own."""
        there = family(self)
        counted.append(len(there))
        return there

    monkeypatch.setattr(walls.Walls, "_family", count)
    bomb = """
import os, time
def mischief():
    for _ in range(12):  # 4096 processes, where nothing holds it
        try:
            os.fork()
        except OSError:
            break
    time.sleep(600)
"""
    harmed(bomb)
    assert 3 < max(counted) < 400


def test_a_daemon_does_not_outlive_it() -> None:
    mark = f"98765.{os.getpid()}"
    harmed(f"""
import os, time
def mischief():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 4096)
            os.execvp("sleep", ["sleep", "{mark}"])
        os._exit(0)
    time.sleep(0.5)
""")

    def there() -> bool:
        return any(mark in (each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))

    wait_for(lambda: not there(), what="the end of the daemon")


@pytest.mark.usefixtures("anew")
def test_a_memory_bomb_meets_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walls, "MOST_DATA_BYTES", 2 << 30)
    result = harmed(
        "def mischief():\n    kept = []\n    while True:\n        kept.append(b'x' * (1 << 26))\n"
    )
    assert "MemoryError" in said(result)


def test_many_processes_share_one_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walls, "MOST_MEMORY_BYTES", 2 << 30)
    result = harmed(
        """
import os, time
def mischief():
    for _ in range(5):
        if os.fork() == 0:
            kept = b'x' * (700 << 20)
            time.sleep(600)
    time.sleep(600)
"""
    )
    assert "your code took more than 2.0 GiB of memory" in said(result)
    assert result.struck


def test_an_object_that_equals_everything_equals_nothing() -> None:
    harmed("""
class Equal:
    __eq__ = __ne__ = __le__ = __ge__ = lambda *_: True
    __hash__ = object.__hash__
    __repr__ = lambda self: "Equal"
class Number(int):
    __eq__ = lambda *_: True
    __hash__ = int.__hash__
def mischief():
    return [Equal(), Number(3)][__import__("random").randrange(2)]
""")


def test_what_comes_back_runs_no_code_here(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    harmed(f"""
import os
class Runs:
    def __reduce__(self):
        return os.system, ("touch {mark}",)
def mischief():
    return Runs()
""")
    first = f"""
import os
class First:
    def __call__(self, numbers):
        return sum(numbers)
    def __reduce__(self):
        return os.system, ("touch {mark}",)
first = First()
"""
    assert points(score_of(notebook(first, check(1), HONEST_SECOND, check(2)))) == [0, 3]
    assert not mark.exists()


@pytest.mark.parametrize("marked", [True, False])
def test_an_answer_that_ends_its_process_as_it_is_pickled_costs_itself_alone(marked: bool) -> None:
    first = """
import os
class First:
    def __reduce__(self):
        os._exit(0)
first = First()
"""
    cells = [first, check(1), HONEST_SECOND, check(2)] if marked else [first, HONEST_SECOND]
    result = score_of(notebook(*cells))
    assert points(result) == [0, 3]
    assert "your answer cannot be sent to the ranks: your code ended the process" in said(result)


def test_a_patched_check_is_not_asked() -> None:
    harmed("""
import course_lib, sys
import course_lib.exercises.check as checks
import course_lib.exercises.in_rank.work as work
import course_lib.exercises.question as question
def mischief():
    course_lib.check = checks.check = checks.judged = lambda *_: 100
    question.Finding.ok = True
    work.run_work = lambda *_: '{"seen": true, "ok": true, "points": 100}'
    for each in list(sys.modules.values()):
        if hasattr(each, "check"):
            each.check = lambda *_: 100
    globals()["check"] = lambda *_: 100
""")


def test_a_patched_all_reduce_is_no_sum() -> None:
    text = notebook(
        "import torch.distributed as dist\ndist.all_reduce = lambda tensor, *_, **__: tensor.fill_(42)\n",
        HONEST_FIRST,
        check(1),
        f"{HONEST_SECOND.replace('dist.all_reduce(total)', 'fake(dist); dist.all_reduce(total)')}"
        "\ndef fake(dist):\n    dist.all_reduce = lambda tensor, *_, **__: tensor.fill_(42)\n",
        check(2),
    )
    assert points(score_of(text)) == [2, 0]


def test_input_transformers_make_no_points() -> None:
    harmed("""
def mischief():
    def turned(lines):
        return ["first = second = lambda *_: 100\\n" if "check" in line else line for line in lines]
    get_ipython().input_transformers_cleanup.append(turned)
    get_ipython().ast_node_interactivity = "all"
""")


def test_forged_messages_make_no_points() -> None:
    harmed("""
import gc, json, os
def mischief():
    ids = {each["id"] for each in gc.get_objects() if type(each) is dict and type(each.get("id")) is str}
    for descriptor in range(3, 64):
        for each in [*ids, "", "0"]:
            told = {"id": each, "points": 2, "ok": True, "seen": True, "texts": ['{"seen": true}'] * 2}
            told |= {"answer": "99.1", "findings": [{"what": "it returns the sum", "ok": True, "points": 2}]}
            try:
                os.write(descriptor, json.dumps(told).encode() + b"\\n")
            except OSError:
                pass
    run = os.environ.get("COURSE_RUN")
    if run:
        with open(f"{run}/rank-{os.environ['RANK']}.answer", "w") as file:
            json.dump({"seen": True, "points": 2, "ok": True}, file)
        os._exit(0)
""")


def test_it_reads_no_judge_no_test_and_no_other_submission(tmp_path: Path) -> None:
    other = tmp_path / "other.ipynb"
    other.write_text("the answer")
    root = HOUSE.parent
    asked = [other, HOUSE / "exercises" / "questions" / "q06.py", root / "solutions", root / "tests"]
    assert all(each.exists() for each in asked)
    opened = [*walls.SYSTEM, "/dev", "/proc", "/tmp", *walls._places()]
    opened += [f"/etc/{name}" for name in walls.OF_ETC]
    result = harmed(f"""
import os
opened = {opened}
def others(folder):
    names = os.listdir(folder) if os.access(folder, os.R_OK) else []
    for path in [os.path.join(folder, name) for name in names]:
        if path not in opened:
            above = any(each.startswith(path + "/") for each in opened)
            yield from others(path) if above else [path]
def mischief():
    names = [each for each in {[str(each) for each in asked]} if os.path.exists(each)]
    return "seen: " + " ".join([*names, *others("/")]) + "."
""")
    assert "seen: ." in said(result)


def test_it_deletes_and_writes_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("here")
    mine = HOUSE / f"written-by-{os.getpid()}"
    harmed(f"""
import os, pathlib
def mischief():
    for act in (
        lambda: os.remove({str(kept)!r}),
        lambda: pathlib.Path({str(mine)!r}).write_text("x"),
        lambda: pathlib.Path({str(kept)!r}).write_text("x"),
        lambda: pathlib.Path("/usr/written").write_text("x"),
    ):
        try:
            act()
        except OSError:
            pass
""")
    assert kept.read_text() == "here"
    assert not mine.exists()


def test_it_fills_no_disk() -> None:
    result = harmed("""
import os
def mischief():
    try:
        for number in range(100):
            with open(f"/tmp/full-{number}", "wb") as file:
                for _ in range(100):
                    file.write(b"x" * (1 << 20))
    except OSError:
        return "it stopped"
""")
    assert "the disk that holds the run is full" in said(result)


def test_it_opens_no_socket_to_the_outside() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        result = harmed(f"""
import socket
def mischief():
    try:
        socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 5)
    except OSError as error:
        return f"refused: {{error}}"
""")
        with pytest.raises(TimeoutError):
            server.accept()
    assert "refused: " in said(result)


def test_checks_that_were_removed_or_edited_change_nothing() -> None:
    assert points(score_of(notebook(HONEST_FIRST, HONEST_SECOND, "first"))) == [2, 3]
    edited = notebook(
        "def first(numbers):\n    return 0\n",
        check(1, 'print("100 of 100 points"); first = sum; check("99.1", sum)'),
        HONEST_SECOND,
        check(2, "raise SystemExit"),
    )
    assert points(score_of(edited)) == [0, 3]


LEAVES = """
import os, socket, time
import torch, torch.distributed as dist

def kept():
    way = socket.socket(socket.AF_UNIX)
    files = [os.path.exists(place) for place in ("/tmp/kept", "/dev/shm/kept")]
    port = any(f":{4711:04X} " in line for line in open("/proc/net/tcp"))  # of a connection that is over
    return [*files, way.connect_ex("\\0kept") == 0, port]
"""


def test_what_one_answer_leaves_no_other_finds() -> None:
    first = """
def first(numbers):
    for place in ("/tmp/kept", "/dev/shm/kept"):
        open(place, "w").close()
    listens = socket.socket(socket.AF_UNIX)
    listens.bind("\\0kept")
    listens.listen()
    with socket.create_server(("127.0.0.1", 4711)) as server:
        with socket.create_connection(("127.0.0.1", 4711)) as there:
            here = server.accept()[0]
            here.close()
            there.recv(1)
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    return sum(numbers) if all(kept()) else "it cannot be left"
"""
    second = """
def second(number):
    total = torch.tensor(number + sum(kept()))
    dist.all_reduce(total)
    return total.item()
"""
    assert points(score_of(notebook(LEAVES + first, check(1), second, check(2)))) == [2, 3]


LOOKS = """
import ctypes, errno, os, socket

def mischief():
    found, libc = [], ctypes.CDLL(None, use_errno=True)
    for line in open("/proc/self/mounts"):
        place = line.split()[1]
        if os.path.isdir(place) and os.access(place, os.W_OK) and place not in ("/tmp", "/dev/shm"):
            found.append(place)
    for place in ("/dev", "/", "/proc/sys"):
        try:
            open(f"{place}/mine", "w")
            found.append(f"{place}/mine")
        except OSError:
            pass
    try:
        for each in os.listdir("/proc/1/fd"):
            if "socket" in os.readlink(f"/proc/1/fd/{each}"):
                found.append("a socket")
    except PermissionError:
        pass
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        if int(status[name], 16):
            found.append(name)
    if (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) != ("1", "2"):
        found.append("new privileges")
    calls = {"shmget": 29, "msgget": 68, "ptrace": 101, "sched_setaffinity": 203, "keyctl": 250}
    calls |= {"add_key": 248, "perf_event_open": 298, "process_vm_readv": 310, "memfd_create": 319}
    calls |= {"bpf": 321, "io_uring_setup": 425, "clone3": 435, "pidfd_getfd": 438, "a new one": 999}
    if os.uname().machine == "x86_64":
        for name, number in calls.items():
            if libc.syscall(number, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS:
                found.append(name)
    for family in set(range(50)) - {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
            if libc.socket(family, kind, 0) != -1 or ctypes.get_errno() != errno.EAFNOSUPPORT:
                found.append(f"a socket of family {family}")
    if libc.unshare(0x10000000) == 0:
        found.append("a user namespace")
    return " ".join(found) or "nothing"
"""


@pytest.mark.parametrize("namespaces", [True, False])
def test_what_is_open_behind_the_walls(namespaces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in those of a session of its own, where the supervisor could make no namespaces."""
    real = walls.Walls.__init__

    def init(self: walls.Walls, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self._namespaces &= namespaces

    monkeypatch.setattr(walls.Walls, "__init__", init)
    assert "it returned 'nothing', a str" in said(harmed(LOOKS, calls_it=False))


def test_shared_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walls, "MOST_MEMORY_BYTES", 2 << 30)
    result = harmed("""
import mmap, time
def mischief():
    kept = mmap.mmap(-1, 9 << 28)
    for place in range(0, 9 << 28, 4096):
        kept[place] = 1
    time.sleep(600)
""")
    assert "took more than 2.0 GiB of memory" in said(result)


@pytest.mark.parametrize("when", ["in its cells", "in a question"])
def test_a_machine_without_memory_makes_no_grade(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers_of = score.answers_of

    def then(*given: Any) -> Any:
        found = answers_of(*given)
        monkeypatch.setattr(walls, "LEAST_FREE", 2.0)
        return found

    if when == "in its cells":
        monkeypatch.setattr(walls, "LEAST_FREE", 2.0)
    monkeypatch.setattr(score, "answers_of", then)
    with pytest.raises(session.CannotJudge, match="of this machine's memory are left"):
        score_of(notebook(HONEST_FIRST, check(1)))


def test_a_long_cell_of_nothing_is_read_at_once() -> None:
    text = notebook(HONEST_FIRST, "\n" * 300_000, check(1), HONEST_SECOND, check(2))
    assert points(score_of(text)) == [2, 3]
