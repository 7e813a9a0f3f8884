"""Tables, in text and in HTML."""

from __future__ import annotations

from course_lib.figures.tables import html_table, text_table

ROWS = [{"rank": "0", "device": "cpu"}, {"rank": "10", "device": "<b>cuda:0"}]


def test_in_text_columns_are_aligned() -> None:
    assert text_table(ROWS).splitlines() == ["rank     device", "   0        cpu", "  10  <b>cuda:0"]
    assert text_table([]) == ""


def test_in_html_nothing_of_the_ranks_is_markup() -> None:
    table = html_table(ROWS)
    assert "<th>device</th>" in table
    assert "<td>&lt;b&gt;cuda:0</td>" in table
    assert html_table([]) == ""
