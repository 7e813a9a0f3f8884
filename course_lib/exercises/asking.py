"""What a question is made of: what its judge yields, and what its works do with an answer in the ranks.

A judge meets an answer through one door, `Ask`: ``ask(work, *args, nprocs=3)`` lets ``work(answer, *args)``
run on fresh ranks and gives back what it returned there, by rank, as plain data. So a judge neither holds the
answer nor runs code of it, a work holds no expected value, and what crosses between them is JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pickle
import random
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..run_folder import RankFiles, write_whole
from .confined import confined

Work = Callable[..., Any]  # called with the answer, then with what the judge gives it
REST = "This rests on what is above; that comes first."
SO_FAR = "it held as far as your code came"
GO_ON = "It counts once all was asked of it: what stopped your code stands above."
MOST_NUMBERS = 400_000  # that a work may tell of an answer on one rank; eight letters are one
UNWAITED = (
    "rank {} started {} without waiting for the end of it: until somebody waits, nothing is sure to have "
    "arrived, nor to have left"
)


class Ask(Protocol):
    """The one door between a judge and an answer."""

    def __call__(self, work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
        """What ``work(answer, *args)`` returns on each of so many ranks: numbers, strings, lists and dicts.

        Raises
        ------
        Refused
            The answer is not of the kind that was asked for, by `Question.takes` or by the work.
        """

    def folder(self) -> contextlib.AbstractContextManager[Path]:
        """An empty folder where the ranks are; where the judge is there need not be such a path."""


class Refused(Exception):
    """The answer is not of the kind that was asked for; the text says what is."""


@dataclass
class Finding:
    """One property of an answer: whether it holds, and if not, what shows it and where to look."""

    what: str
    ok: bool = False
    seen: str = ""
    hint: str = ""
    points: float = 0.0


Judge = Callable[[Ask, random.Random], Iterator[Finding]]


@dataclass
class Question:
    """What is asked for: its form, its properties with their points, and the judge of an answer."""

    form: str  # "pass_right(tensor)"
    properties: dict[str, float]
    judge: Judge
    takes: Callable[[Any, str], None]
    rests: Mapping[str, str] = field(default_factory=dict)  # as in `question`

    def findings(self, ask: Ask, rng: random.Random) -> Iterator[Finding]:
        """Every property as it was judged; one that the judge does not come to does not hold.

        Of several findings for one property the first that does not hold is shown. What rests on a property
        that does not hold does not hold either. Where the judge cannot go on, and all held so far, nothing
        counts: a fault costs at least what it stopped, and here that may be any of them.
        """
        judged: dict[str, Finding] = {}
        trouble: Exception | None = None
        try:
            with _as_in_a_fresh_process():
                for found in self.judge(ask, rng):
                    if found.what not in judged or judged[found.what].ok:
                        judged[found.what] = found
        except Exception as error:
            trouble = error
            if all(what in judged and judged[what].ok for what in self.properties):
                judged = {what: Finding(what, False, SO_FAR, GO_ON) for what in judged}
        holds: dict[str, bool] = {}
        for what, points in self.properties.items():
            found = judged.get(what, Finding(what))
            if what in judged and what in self.rests and not holds[self.rests[what]]:
                found.seen = "it is not counted yet" if found.ok else found.seen
                found.ok, found.hint = False, REST
            found.ok, found.points = bool(found.ok), points
            holds[what] = found.ok
            yield found
        if trouble is not None:
            raise trouble


QUESTIONS: dict[str, Question] = {}


def a_function(answer: Any, form: str) -> None:
    """Refuse an answer that cannot be called."""
    if not callable(answer):
        raise Refused(f"{form} is a function; this is {_shown(answer)}")


def a_module(answer: Any, form: str) -> None:
    """Refuse an answer that is no class of `torch.nn.Module`."""
    if not (isinstance(answer, type) and issubclass(answer, torch.nn.Module)):
        raise Refused(f"{form} is a class, an nn.Module; this is {_shown(answer)}")


def question(
    number: str,
    form: str,
    properties: dict[str, float],
    takes: Callable[[Any, str], None] = a_function,
    rests: Mapping[str, str] | None = None,
) -> Callable[[Judge], Judge]:
    """Register the judge of a question.

    Parameters
    ----------
    number
        As in ``"05.1"``.
    form
        What is asked for, as a learner writes it: ``"pass_right(tensor)"``.
    properties
        What a right answer does, in words, and the points for each.
    takes
        Refuses an answer of another kind, in the rank: `a_function` or `a_module`.
    rests
        For a property one that stands before it, without which it does not count.
    """

    def register(judge: Judge) -> Judge:
        QUESTIONS[number] = Question(form, properties, judge, takes, rests or {})
        return judge

    return register


# --- in a rank --------------------------------------------------------------------------------------------


def answered(asked: tuple[Callable[[Any, str], None], str], work: Work, answer: Any, args: Any) -> str:
    """In a rank: what a work saw of an answer, or its refusal, as JSON; what the answer raises is raised."""
    takes, form = asked
    try:
        takes(answer, form)
        seen = work(answer, *args)
        if not _is_handy(seen):
            raise Refused(f"your code gave back more than {MOST_NUMBERS:,} numbers; far fewer are asked for")
        told = {"seen": seen}
    except Refused as reason:
        told = {"refused": str(reason)}
    return json.dumps(told, default=_numbers_of)


def answer_in_a_rank(asked: Any, work: Work, answer: bytes, args: Any) -> None:
    """In a rank of a run: leave what `answered` tells of a pickled answer in the run's folder.

    What stands here can be forged: an answer runs in this process, may write that file itself and end the
    process. No secret helps, since the process would have to know it. So a judge sends no expected value
    here, and looks at what forged numbers are unlikely to hold together, such as what all ranks sent and
    got; a grader reads the answers.
    """
    files = RankFiles(Path(os.environ["COURSE_RUN"]), int(os.environ["RANK"]))
    with confined():
        write_whole(files.answer, answered(asked, work, pickle.loads(answer), args))


def _is_handy(value: Any) -> bool:
    """Whether it holds no more than `MOST_NUMBERS`; it is looked at no further than that."""
    count, rest = 0, [value]
    while rest and count <= MOST_NUMBERS:
        each = rest.pop()
        if isinstance(each, list | tuple | dict):
            count += len(each)
            if count <= MOST_NUMBERS:
                rest += [*each, *each.values()] if isinstance(each, dict) else each
        elif isinstance(each, str):
            count += len(each) // 8
        elif isinstance(each, torch.Tensor):
            count += each.numel()
        else:
            count += getattr(each, "size", 1) if hasattr(each, "tolist") else 1
    return count <= MOST_NUMBERS


def read(text: str) -> Any:
    """What `answered` told; it comes from a stranger, and is data whatever it holds.

    Raises
    ------
    Refused
        The work's own refusal, or a text that is none of `answered`'s.
    """
    try:
        told = json.loads(text)
        refused = told.get("refused")
        if refused is None:
            return told["seen"]
    except (ValueError, KeyError, AttributeError, RecursionError):
        refused = "what your code left behind cannot be read"
    raise Refused(str(refused))


def in_group(work: Work) -> Work:
    """A work of ranks in one gloo group: none begins before all are in, none ends before all have.

    Each is on a node of its own, as far as the environment tells: a local rank is no rank.

    Refused where something was started (``async_op``) that nobody waited for: what came of it is chance.
    """

    @functools.wraps(work)
    def joined(answer: Any, *args: Any) -> Any:
        import torch.distributed as dist

        from .traffic import let_end, waits

        store, rank, count = next(dist.rendezvous("env://"))
        on_a_node_of_its_own()

        def meet(word: str) -> None:
            store.set(f"course/{word}/{rank}", "here")
            store.wait([f"course/{word}/{each}" for each in range(count)])

        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        meet("begins")
        with waits() as pending:
            try:
                result = work(answer, *args)
            except Refused:  # on this rank; the others must not wait for it
                meet("ends")
                raise
        names = [name for name, _ in pending.values()]
        let_end([work for _, work in pending.values()])  # no rank leaves while another is in it
        meet("ends")
        if names:
            raise Refused(UNWAITED.format(rank, " and ".join(dict.fromkeys(names))))
        return result

    return joined


def on_a_node_of_its_own() -> None:
    """Let this process's environment say what torchrun would on a machine that has one rank."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}


def number(value: Any) -> float | str:
    """A number of whatever type as a float; of all else, what it is, in words."""
    if not isinstance(value, bool | str | bytes):
        with contextlib.suppress(BaseException):  # also what an answer's own class raises
            return float(value)
    return told(value)


def told(value: Any) -> str:
    """What came back, in words: for a value that is not of the kind that was asked for."""
    return "nothing (None)" if value is None else _shown(value)


def reason(error: BaseException) -> str:
    """What an answer raised, in one line."""
    words = ""
    with contextlib.suppress(BaseException):  # its own __str__ fails
        words = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {words:.120}"


class _Short(reprlib.Repr):
    """The beginning of long lists in little time."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxarray = 30
        self.maxstring = self.maxlong = self.maxother = 200

    def repr_instance(self, value: Any, level: int) -> str:
        return repr(value)  # what that raises is for who asked


def _shown(value: Any) -> str:
    try:
        return f"{_Short().repr(value):.60}, {_a_type(value)}"
    except BaseException:  # its own __repr__ fails, or would end the process
        return _a_type(value)


def _a_type(value: Any) -> str:
    name = type(value).__name__
    return f"a{'n' * (name[:1] in 'aeiouAEIO')} {name}"


def _numbers_of(value: Any) -> Any:
    """For JSON: what a tensor or an array holds, as (nested) lists; of all else, what it is."""
    with contextlib.suppress(Exception):  # a tensor without numbers: sparse, or on the device meta
        return value.detach().cpu().tolist() if isinstance(value, torch.Tensor) else value.tolist()
    return told(value)


def the_number(value: Any, what: str) -> float:
    """`number`, or a refusal that begins with what was asked for, in words."""
    found = number(value)
    if isinstance(found, str):
        raise Refused(f"{what}; it returned {found}")
    return found


# --- in a judge -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_in_a_fresh_process() -> Iterator[None]:
    """What a notebook has set for torch must not move a judge's numbers, nor a judge the notebook's dice."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None if device == torch.device("cpu") else device)


def far(a: Any, b: Any) -> float:
    """The largest difference between tensors, or (nested) lists of numbers; NaN and another shape are far."""
    try:
        a, b = (torch.as_tensor(each, dtype=torch.float64) for each in (a, b))
    except (
        TypeError,
        ValueError,
        OverflowError,
    ):  # no numbers, uneven lengths, an int past all floats
        return math.inf
    if a.shape != b.shape:
        return math.inf
    return (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item() if a.numel() else 0.0


def in_digits(*numbers: float) -> list[str]:
    """Numbers in as many digits as tell them apart, and in four at least."""
    for digits in (4, 8, 12, 17):
        words = [f"{each:.{digits}g}" for each in numbers]
        if len(set(words)) == len(set(numbers)):
            break
    return words


def nearest(value: Any, *known: tuple[Any, str], otherwise: str, within: float) -> str:
    """The hint for the first of the known wrong values that an answer has hit."""
    return next((hint for wrong, hint in known if far(value, wrong) < within), otherwise)
