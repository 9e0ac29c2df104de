"""The documentation as a site: the pages of this folder, the README in front, API pages from the docstrings.

`scripts/build_docs.sh` builds it. The pages stay plain Markdown, which a forge shows as it is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jitgemm

project = "jitgemm"
author = "the jitgemm authors"
copyright = "MIT license"
version = release = jitgemm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"jitgemm {version}"
html_static_path, html_css_files = ["_static"], ["site.css"]

myst_heading_anchors = 3
highlight_language = "none"  # blocks without a language are tables, drawings and commands
smartquotes = False
default_role = "py:obj"  # docstrings write `name` for code: a link where there is one
autodoc_default_options = {"member-order": "bysource"}
autodoc_mock_imports = ["transformers"]  # which jitgemm.hf imports
autodoc_typehints = "signature"
autodoc_use_legacy_class_based = False
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True

OF_THE_ROOT = {"index": "README", "changelog": "CHANGELOG", "contributing": "CONTRIBUTING", "security": "SECURITY"}
"""Pages of the site that show a file above this folder."""
FOLDERS = {"notes/README": "*\nlog/*"}
"""Pages that list a folder: what stands below them."""


def read_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Puts the files of the root in, and turns links to them into links to their pages."""
    up = "../" * (page.count("/") + 1)
    if page in OF_THE_ROOT:
        file = ROOT / f"{OF_THE_ROOT[page]}.md"
        app.env.note_dependency(str(file))
        trees = source[0].partition("```{toctree}")
        text = file.read_text(encoding="utf-8").replace("](docs/", "](")
        source[0] = text + "\n" + "".join(trees[1:])
        up = ""
    for name, root in OF_THE_ROOT.items():
        link = f"]({up.removeprefix('../')}{name}.md"
        source[0] = source[0].replace(f"]({up}{root}.md", link)
    if page in FOLDERS:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{FOLDERS[page]}\n```\n"


def read_docstring(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text: outside of literal blocks |x| is an absolute value, and `name`s a plural."""
    literal: int | None = None  # indentation of the paragraph that a literal block hangs on
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if literal is not None and line and indent <= literal:
            literal = None
        if literal is None:
            lines[number] = re.sub(r"(?<=\w`)(?=\w)", r"\\ ", line.replace("|", "\\|"))
            if line.endswith("::"):
                literal = indent


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # napoleon has 500
