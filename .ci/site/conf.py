"""Sphinx's configuration for the site, which `build.py` builds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish

project = "Training with many GPUs in PyTorch"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # a copy of MathJax beside the pages
]
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # outputs contain more than one language
exclude_patterns = ["lessons/scripts", "zh"]  # `zh` is a site of its own
html_theme = "sphinx_book_theme"
html_title = project
html_css_files = ["site.css"]
html_copy_source = False
html_search_language = "zh"  # `Words`: English pages contain Chinese words, too
templates_path = ["."]  # language.html
html_use_index = False  # the glossary and the reference are short, and there is a search
html_theme_options = {
    "navbar_start": [],  # the search is already above the list of pages
    "navbar_persistent": [],
    "navbar_end": [],
    "article_header_end": ["language.html", "article-header-buttons.html"],
    "footer_content_items": [],
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
autodoc_typehints = "description"
autodoc_member_order = "bysource"


class Words(SearchEnglish):
    """English words, and all pairs of adjacent Chinese characters: this needs no dictionary."""

    lang = "zh"
    js_splitter_code = r"""
function splitQuery(query) {
  const words = query.match(/(?:(?![\u4e00-\u9fff])[\p{Letter}\p{Number}_])+/gu) || []
  return [...words, ...Array.from(query.matchAll(/(?=([\u4e00-\u9fff]{2}))/g), found => found[1])]
}"""

    def split(self, input: str) -> list[str]:
        return re.findall(r"[^\W\u4e00-\u9fff]+", input) + re.findall(r"(?=([\u4e00-\u9fff]{2}))", input)


def setup(app: Any) -> None:
    app.add_search_language(Words)
    app.connect("html-page-context", link_to_the_other_language)
    app.connect("html-page-context", name_the_arrows, priority=600)  # after the theme


def link_to_the_other_language(app: Any, page: str, _: str, context: dict[str, Any], *__: Any) -> None:
    chinese = app.config.language == "zh_CN"
    if chinese or any((Path(app.srcdir) / "zh").glob(f"{page}.*")):
        context["other_language"] = "en" if chinese else "zh-CN"
        context["other_page"] = f"{context['content_root']}{'..' if chinese else 'zh'}/{page}.html"


def name_the_arrows(_app: Any, _page: str, _template: str, context: dict[str, Any], *_: Any) -> None:
    """Give the arrows in the list of pages a name, which the theme does not, for screen readers."""
    by_theme, label = context["generate_toctree_html"], '<summary aria-label="Its pages">'
    context["generate_toctree_html"] = lambda *a, **b: str(by_theme(*a, **b)).replace("<summary>", label)
