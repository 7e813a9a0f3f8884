"""Sphinx's configuration for the site, which `build.py` builds."""

from __future__ import annotations

from typing import Any

project = "Training with many GPUs in PyTorch"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.githubpages",  # adds .nojekyll, without which GitHub Pages leaves out _static
    "sphinx-mathjax-offline",  # a copy of MathJax beside the pages
]
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # outputs contain more than one language
exclude_patterns = ["lessons/scripts"]
html_theme = "sphinx_book_theme"
html_title = project
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_use_index = False  # the glossary and the reference are short, and there is a search
html_theme_options = {
    "navbar_start": [],  # the search is already above the list of pages
    "navbar_persistent": [],
    "navbar_end": [],
    "footer_content_items": [],
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "use_issues_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = False


def setup(app: Any) -> None:
    app.connect("html-page-context", name_the_arrows, priority=600)  # after the theme


def name_the_arrows(_app: Any, _page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Name the arrows that open the list of pages for screen readers, as the theme does not."""
    without = context["generate_toctree_html"]
    context["generate_toctree_html"] = lambda *given, **options: str(without(*given, **options)).replace(
        "<summary>", '<summary aria-label="Its pages">'
    )
