"""Format tables of text, for a notebook and for a terminal."""

from __future__ import annotations

import html


def html_table(rows: list[dict[str, str]]) -> str:
    """Format rows with the same keys as an HTML table."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    cells = ("".join(f"<td>{html.escape(text)}</td>" for text in row.values()) for row in rows)
    body = "".join(f"<tr>{each}</tr>" for each in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def text_table(rows: list[dict[str, str]]) -> str:
    """Format rows with the same keys as aligned text."""
    if not rows:
        return ""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [dict(zip(widths, widths, strict=True)), *rows]
    return "\n".join("  ".join(line[name].rjust(width) for name, width in widths.items()) for line in lines)
