"""What each mutation operator changes in an answer, and what it does not."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterable

import pytest

from tests.mutants import mutate
from tests.mutants.mutate import Edit, Source, change, mutants


def cell(body: str) -> str:
    """Return an answer's cell, with given lines before and after the solution."""
    inside = textwrap.indent(f"### BEGIN SOLUTION\n{body}\n### END SOLUTION", " " * 4)
    return f"def answer(x, y):\n    given = f(x) + 1\n{inside}\n    return given + 2\n"


def changed(operator: Callable[[Source], Iterable[Edit]], body: str) -> set[str]:
    """Return the solutions that an operator makes from one."""
    source = Source(cell(body))
    found = set()
    for edit in operator(source):
        text = source.text[: edit.start] + edit.text + source.text[edit.end :]
        ast.parse(text)
        inside = text.split("### BEGIN SOLUTION\n")[1].split("### END SOLUTION")[0]
        found.add(textwrap.dedent(inside.rstrip(" ")).rstrip("\n"))
    return found


@pytest.mark.parametrize(
    ("operator", "body", "expected"),
    [
        (mutate.left_out, "f(x)\nx += 1", {"pass\nx += 1", "f(x)\npass"}),
        (mutate.left_out, "z = f(x)", set()),  # mutmut assigns None
        (mutate.left_out, "x.grad = None", {"pass"}),
        (mutate.left_out, "for z in x:\n    break", {"pass", "for z in x:\n    pass"}),
        (
            mutate.its_header_left_out,
            "with torch.no_grad():\n    f(x)\n    g(x)",
            {"if True:\n    f(x)\n    g(x)"},
        ),
        (mutate.its_header_left_out, "try:\n    f(x)\nexcept E:\n    g(x)", {"if True:\n    f(x)"}),
        (mutate.swapped, "f(x)\n# why\ng(y)", {"g(y)\nf(x)"}),
        (
            mutate.swapped,
            "isend(x)\nirecv(y)\nwait()",
            {"irecv(y)\nisend(x)\nwait()", "isend(x)\nwait()\nirecv(y)"},
        ),
        (
            mutate.moved_out,
            "for z in x:\n    f(z)\n    g(z)",
            {"f(z)\nfor z in x:\n    g(z)", "for z in x:\n    f(z)\ng(z)"},
        ),
        (mutate.ends_early, "for z in x:\n    f(z)", {"for z in x:\n    f(z)\n    break"}),
        (mutate.rebound, "x += y", {"x = x + y"}),
        (mutate.rebound, "x /= y - 1", {"x = x / (y - 1)"}),
        (mutate.rebound, "x.grad.copy_(y)", {"x.grad = y"}),
        (mutate.rebound, "z = 0\nz += y", set()),
        (
            mutate.loops,
            "for i in range(y):\n    f(i)",
            {
                "for i in range(y + 1):\n    f(i)",
                "for i in range(y - 1):\n    f(i)",
                "for i in range(1, y):\n    f(i)",
                "for i in reversed(list(range(y))):\n    f(i)",
            },
        ),
        (
            mutate.loops,
            "z = [f(i) for i in x]",
            {
                "z = [f(i) for i in list(x)[1:]]",
                "z = [f(i) for i in list(x)[:-1]]",
                "z = [f(i) for i in reversed(list(x))]",
            },
        ),
        (mutate.conditions, "if x:\n    f(x)", {"if True:\n    f(x)", "if False:\n    f(x)"}),
        (
            mutate.conditions,
            "z = [i for i in x if i]",
            {"z = [i for i in x if True]", "z = [i for i in x if False]"},
        ),
        (mutate.halves, "z = x - y", {"z = x", "z = y", "z = y - x"}),
        (mutate.halves, "z = x or y", {"z = x", "z = y"}),
        (mutate.halves, "z = -x", {"z = x"}),
        (mutate.halves, "z = 1 if x else y", {"z = 1", "z = y"}),
        (mutate.numbers, "z = dist.get_rank()", {"z = 0", "z = 1"}),
        (mutate.numbers, "z = dist.get_world_size()", {"z = 2", "z = 3", "z = 4"}),
        (mutate.numbers, "z = x[rank]", {"z = x[0]", "z = x[1]"}),
        (mutate.numbers, "z = 5", {"z = 4", "z = 10"}),
        (mutate.calls, "z = x.clone()", {"z = x"}),
        (mutate.calls, "z = x.to(y)", {"z = x", "z = x.to()"}),
        (mutate.calls, "z = f(x, y)", {"z = f(y, x)"}),
        (mutate.calls, "z = x.sum(dim=0)", {"z = x.max(dim=0)", "z = x.sum()"}),
        (mutate.calls, "z = sorted(x)", {"z = x", "z = sorted()"}),
        (mutate.calls, "z = torch.float64", {"z = torch.float32"}),
        (
            mutate.collectives,
            "dist.all_reduce(x)",
            {
                *(f"dist.all_reduce(x, dist.ReduceOp.{name})" for name in ("MAX", "MIN", "AVG", "PRODUCT")),
                "dist.reduce(x, 0)",
                "dist.broadcast(x, 0)",
            },
        ),
        (
            mutate.collectives,
            "dist.all_reduce(x, dist.ReduceOp.MAX)",
            {
                *(f"dist.all_reduce(x, dist.ReduceOp.{name})" for name in ("SUM", "MIN", "AVG")),
                "dist.reduce(x, 0)",
                "dist.broadcast(x, 0)",
            },
        ),
        (mutate.slices, "z = x[y:]", {"z = x", "z = x[:]"}),
    ],
)
def test_an_operator_changes_this(
    operator: Callable[[Source], Iterable[Edit]], body: str, expected: set[str]
) -> None:
    assert changed(operator, body) - {body} == expected


def test_a_text_of_many_lines_loses_each() -> None:
    source = Source(
        'def answer(x):\n    ### BEGIN SOLUTION\n    return f"""a {x}\nb\n"""\n    ### END SOLUTION\n'
    )
    made = {source.text[: e.start] + e.text + source.text[e.end :] for e in mutate.texts(source)}
    results = set()
    for each in made:
        namespace: dict[str, Callable[[int], str]] = {}
        exec(each, namespace)
        results.add(namespace["answer"](7))
    assert results == {"b\n", "a 7\n", "a 2\nb\n", "a 7\nb\n", " 7\nb\n", "a 7\n\n"}


def names(body: str) -> set[str]:
    return {each.change for each in mutants(cell(body))}


def test_mutmut_changes_operators_numbers_and_arguments() -> None:
    made = names("z = f(x, y + 1, k=True)")
    assert "z = f(x, y + 1, k=True) → z = f(x, y - 1, k=True)" in made
    assert "z = f(x, y + 1, k=True) → z = f(x, y + 2, k=True)" in made
    assert "z = f(x, y + 1, k=True) → z = f(x, y + 1, k=False)" in made
    assert "z = f(x, y + 1, k=True) → z = f(x, y + 1, )" in made
    assert "z = f(x, y + 1, k=True) → z = None" in made


def test_each_mutant_is_a_program_of_its_own() -> None:
    source = cell("z = x.to(y) + 1\nfor i in range(z):\n    f(i, given, strict=True)")
    made = mutants(source)
    programs = [ast.dump(ast.parse(each.source)) for each in made]
    assert len({*programs, ast.dump(ast.parse(source))}) == len(made) + 1
    assert len({each.change for each in made}) == len(made)


def test_the_same_change_of_two_lines_has_two_names() -> None:
    assert {"f(x) → pass", "f(x) → pass (2)"} <= names("f(x)\ng(y)\nf(x)")


def test_what_was_given_stays() -> None:
    for each in mutants(cell("z = x + 1")):
        assert each.source.startswith("def answer(x, y):\n    given = f(x) + 1\n    ### BEGIN SOLUTION\n")
        assert "    ### END SOLUTION\n    return given + 2\n" in each.source


def test_what_makes_no_answer_wrong_stays() -> None:
    with_it, without = names("z = zip(x, y, strict=True)"), names("z = zip(x, y)")
    assert not any("strict=False" in each or "strict=None" in each for each in with_it)
    assert len(with_it) == len(without)


def test_a_change_is_named_by_its_lines() -> None:
    assert change("a\n  b\nc", "a\n  d\nc") == "b → d"
    assert change("a\nb", "b") == "a → ∅"


def run(source: str, *calls: object) -> list[object]:
    namespace: dict[str, object] = {}
    exec(source, namespace)
    return [namespace["answer"](*call) for call in calls]  # type: ignore[operator]


def test_a_result_is_kept_for_the_next_call() -> None:
    source = "def answer(x):\n    ### BEGIN SOLUTION\n    return sum(x)\n    ### END SOLUTION\n"
    made = {each.change: each.source for each in mutants(source)}
    same = [1, 2]
    assert run(made["answer: the first result for all calls"], ([1],), ([5],)) == [1, 1]
    by_object = made["answer: the result for the next call with the same objects"]
    namespace: dict[str, object] = {}
    exec(by_object, namespace)
    answer = namespace["answer"]
    assert answer(same) == 3  # type: ignore[operator]
    same.append(4)
    assert answer(same) == 3  # type: ignore[operator]
    assert answer([7]) == 7  # type: ignore[operator]


def test_a_generator_is_kept_as_what_it_gave() -> None:
    source = "def answer(x):\n    ### BEGIN SOLUTION\n    yield from x\n    ### END SOLUTION\n"
    made = {each.change: each.source for each in mutants(source)}
    first, second = run(made["answer: the first result for all calls"], ([1, 2],), ([3],))
    assert [list(first), list(second)] == [[1, 2], [1, 2]]  # type: ignore[call-overload]


def test_a_result_comes_in_float32() -> None:
    source = "def answer(x):\n    ### BEGIN SOLUTION\n    return x / 3\n    ### END SOLUTION\n"
    made = {each.change: each.source for each in mutants(source)}
    (third,) = run(made["answer: the result in float32"], (1,))
    assert third != 1 / 3
    assert third == pytest.approx(1 / 3, rel=1e-6)
