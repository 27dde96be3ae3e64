"""Sphinx's configuration of the documentation: python docs/site/build.py.

Sphinx, because its source folder can be the repository itself: the pages stay where GitHub shows them, and a link means
the same in both places.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "python"), str(ROOT)]

project = "flash-attn-minimal"
author = "The flash-attn-minimal authors"
project_copyright = author
version = release = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "pages", "reference", "excerpts"]
root_doc = "index"  # README.md: pages.py gives every README the name that a folder's page has on a web server
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
include_patterns = ["*.md", "docs/**.md", "docs/api/**.rst", "ladder/**.md", "cuda/**.md", "examples/**.md"]

# ---- Markdown as on GitHub: its anchors, and nothing of MyST's own syntax that a page could meet by accident ----
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto", "repository"]  # the last: a file that is no page, see pages.py
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role"]

# ---- Python's reference ----
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # a signature has names and defaults; the types stand beside the arguments
python_use_unqualified_type_names = True
add_module_names = False

# ---- HTML: system fonts, no address outside the site ----
smartquotes = False  # an option is --suite, not a dash
html_theme = "furo"
html_title = f"{project} {version}"
html_static_path = ["site.css", "excerpts.js"]
html_css_files = ["site.css"]
html_show_search_summary = (
    False  # Sphinx would fetch each page for it, which a browser refuses to a site on disk: excerpts.py
)
html_copy_source = html_show_sourcelink = False
html_show_sphinx = False
html_use_index = html_domain_indices = False  # the search does what they do
html_last_updated_fmt = None
pygments_style, pygments_dark_style = "friendly", "monokai"
highlight_language = "none"  # a fenced block without a language is a drawing or a command's output
