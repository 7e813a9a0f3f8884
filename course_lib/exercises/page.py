"""The frame of an HTML page that runs no script and loads nothing from elsewhere."""

from __future__ import annotations

import html

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'unsafe-inline'; img-src 'self'">{head}
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>:root{{color-scheme:light dark}}
body{{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}
table{{border-collapse:collapse}}td,th{{padding:.2em .8em;border-bottom:1px solid;text-align:left}}
td.all{{background:light-dark(#b5d5f2,#20476f)}}td.stuck{{background:light-dark(#ffd9a8,#5c3200)}}
pre{{white-space:pre-wrap}}img{{max-width:100%}}</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


def page(title: str, body: str, reloaded_seconds: float = 0) -> str:
    """Return a page with this title, which is escaped, and this HTML; it may reload itself again and again.

    Lone surrogates, which JSON may contain but a file cannot, become escapes.
    """
    head = f'<meta http-equiv="refresh" content="{reloaded_seconds:g}">' if reloaded_seconds else ""
    whole = PAGE.format(title=html.escape(title), body=body, head=head)
    return whole.encode("utf-8", "backslashreplace").decode()
