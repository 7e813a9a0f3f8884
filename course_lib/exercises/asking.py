"""The parts of a question: its judge, which yields findings, and its works, which use an answer in the ranks.

A judge reaches an answer only through `Ask`: ``ask(work, *args, nprocs=3)`` runs ``work(answer, *args)`` on
fresh ranks and returns what it returned there, by rank, as plain data. So a judge neither has the answer nor
runs its code, a work contains no expected value, and only JSON crosses between them.
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

Work = Callable[..., Any]  # called with the answer, then with the judge's arguments
REST = "This rests on what is above; that comes first."
SO_FAR = "it held as far as your code came"
GO_ON = "It counts once all was asked of it: what stopped your code stands above."
MOST_NUMBERS = 400_000  # that a work may report on one rank; eight characters count as one
UNWAITED = (
    "rank {} started {} without waiting for the end of it: until somebody waits, nothing is sure to have "
    "arrived, nor to have left"
)


class Ask(Protocol):
    """The only way for a judge to reach an answer."""

    def __call__(self, work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
        """Run ``work(answer, *args)`` on ranks; return, by rank, its numbers, strings, lists and dicts.

        Raises
        ------
        Refused
            `Question.takes` or the work has found that the answer is not of the kind asked for.
        """

    def folder(self) -> contextlib.AbstractContextManager[Path]:
        """Provide an empty folder for the ranks; its path need not exist where the judge is."""


class Refused(Exception):
    """The answer is not of the kind asked for, or cannot be judged; the message says why."""


@dataclass
class Finding:
    """One property of an answer: whether it holds and, if not, what shows that and where to look."""

    what: str
    ok: bool = False
    seen: str = ""
    hint: str = ""
    points: float = 0.0


Judge = Callable[[Ask, random.Random], Iterator[Finding]]


@dataclass
class Question:
    """A question: the form and properties of a right answer, the points for each, and the judge."""

    form: str  # "pass_right(tensor)"
    properties: dict[str, float]
    judge: Judge
    takes: Callable[[Any, str], None]
    rests: Mapping[str, str] = field(default_factory=dict)  # as in `question`

    def findings(self, ask: Ask, rng: random.Random) -> Iterator[Finding]:
        """Yield every property as it was judged; one that the judge does not reach does not hold.

        Of several findings for one property, the first that does not hold counts. A property that rests on
        one that does not hold does not hold either. If the judge fails when all properties have held so far,
        none counts: a fault costs at least what it has cut off, and here that may be any of them.
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
    """Refuse an answer that is not a subclass of `torch.nn.Module`."""
    if not (isinstance(answer, type) and issubclass(answer, torch.nn.Module)):
        raise Refused(f"{form} is a class, an nn.Module; this is {_shown(answer)}")


def question(
    number: str,
    form: str,
    properties: dict[str, float],
    takes: Callable[[Any, str], None] = a_function,
    rests: Mapping[str, str] | None = None,
) -> Callable[[Judge], Judge]:
    """Register the decorated function as the judge of a question.

    Parameters
    ----------
    number
        The question's number, as in ``"05.1"``.
    form
        What is asked for, as a learner writes it: ``"pass_right(tensor)"``.
    properties
        What a right answer does, in words, and the points for each.
    takes
        Refuses an answer of another kind, in the rank: `a_function` or `a_module`.
    rests
        For a property, an earlier one that must hold for it to count.
    """

    def register(judge: Judge) -> Judge:
        QUESTIONS[number] = Question(form, properties, judge, takes, rests or {})
        return judge

    return register


# --- in a rank --------------------------------------------------------------------------------------------


def answered(asked: tuple[Callable[[Any, str], None], str], work: Work, answer: Any, args: Any) -> str:
    """In a rank, run a work on an answer; return as JSON what it saw or its refusal. Errors propagate."""
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
    """In a rank of a run, leave what `answered` returns for a pickled answer in the run's folder.

    That file can be forged: the answer runs in this process, and may write the file itself and end the
    process. No secret helps, since the process would have to know it. So a judge sends no expected value
    here, and checks relations that forged numbers are unlikely to satisfy, such as between what all ranks
    sent and received; a grader reads the answers.
    """
    files = RankFiles(Path(os.environ["COURSE_RUN"]), int(os.environ["RANK"]))
    with confined():
        write_whole(files.answer, answered(asked, work, pickle.loads(answer), args))


def _is_handy(value: Any) -> bool:
    """Return whether a value holds no more than `MOST_NUMBERS` numbers, without looking beyond that."""
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
    """Read what `answered` wrote; it is untrusted, and is only data whatever it contains.

    Raises
    ------
    Refused
        The work refused the answer, or `answered` did not write the text.
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
    """Wrap a work to run in one gloo group: no rank begins before all have joined, or ends before all have.

    The environment puts each rank on a node of its own, so that a local rank cannot pass for a rank.

    An answer that starts something (``async_op``) and does not wait for it is refused: its result is chance.
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
            except Refused:  # on this rank alone; the others must not wait for it
                meet("ends")
                raise
        names = [name for name, _ in pending.values()]
        let_end([work for _, work in pending.values()])  # no rank leaves while another is at work on it
        meet("ends")
        if names:
            raise Refused(UNWAITED.format(rank, " and ".join(dict.fromkeys(names))))
        return result

    return joined


def on_a_node_of_its_own() -> None:
    """Set this process's environment as torchrun would on a node with one rank."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}


def number(value: Any) -> float | str:
    """Convert a number of any type to a float; describe all else in words."""
    if not isinstance(value, bool | str | bytes):
        with contextlib.suppress(BaseException):  # also what an answer's own class raises
            return float(value)
    return told(value)


def told(value: Any) -> str:
    """Describe in words a returned value that is not of the kind asked for."""
    return "nothing (None)" if value is None else _shown(value)


def reason(error: BaseException) -> str:
    """Describe in one line what an answer raised."""
    words = ""
    with contextlib.suppress(BaseException):  # its own __str__ may fail
        words = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {words:.120}"


class _Short(reprlib.Repr):
    """A repr that shows the beginning of long lists, in little time."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxarray = 30
        self.maxstring = self.maxlong = self.maxother = 200

    def repr_instance(self, value: Any, level: int) -> str:
        return repr(value)  # the caller handles what that raises


def _shown(value: Any) -> str:
    try:
        return f"{_Short().repr(value):.60}, {_a_type(value)}"
    except BaseException:  # its own __repr__ may fail, or try to end the process
        return _a_type(value)


def _a_type(value: Any) -> str:
    name = type(value).__name__
    return f"a{'n' * (name[:1] in 'aeiouAEIO')} {name}"


def _numbers_of(value: Any) -> Any:
    """Convert a tensor or an array to (nested) lists, for JSON; describe all else in words."""
    with contextlib.suppress(Exception):  # a tensor without numbers: sparse, or on the meta device
        return value.detach().cpu().tolist() if isinstance(value, torch.Tensor) else value.tolist()
    return told(value)


def the_number(value: Any, what: str) -> float:
    """Return `number`, or refuse a value with a message that begins with what was asked for."""
    found = number(value)
    if isinstance(found, str):
        raise Refused(f"{what}; it returned {found}")
    return found


# --- in a judge -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_in_a_fresh_process() -> Iterator[None]:
    """Shield a judge from the notebook's torch settings, and the notebook's RNG state from the judge."""
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
    """Return the largest difference of two tensors or (nested) lists; inf for a NaN or different shapes."""
    try:
        a, b = (torch.as_tensor(each, dtype=torch.float64) for each in (a, b))
    except (
        TypeError,
        ValueError,
        OverflowError,
    ):  # not numbers, uneven lengths, an int too large for a float
        return math.inf
    if a.shape != b.shape:
        return math.inf
    return (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item() if a.numel() else 0.0


def in_digits(*numbers: float) -> list[str]:
    """Format numbers with as many digits as tell them apart, and at least four."""
    for digits in (4, 8, 12, 17):
        words = [f"{each:.{digits}g}" for each in numbers]
        if len(set(words)) == len(set(numbers)):
            break
    return words


def nearest(value: Any, *known: tuple[Any, str], otherwise: str, within: float) -> str:
    """Return the hint for the first known wrong value that an answer has hit, or ``otherwise``."""
    return next((hint for wrong, hint in known if far(value, wrong) < within), otherwise)
