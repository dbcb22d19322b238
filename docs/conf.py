"""Settings of the documentation site, which ``make docs`` builds into ``docs/_build/html``.

The pages need no network: no fonts, scripts or pictures come from elsewhere, and no other project's index is read.
"""

import sys
import warnings
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS / "_extensions"), str(DOCS.parent / "src")]

import fedalign  # noqa: E402  # found through the path above, so that the site documents this checkout

project = "FedALIGN"
author = "The FedALIGN maintainers"
copyright = "The FedALIGN maintainers, Apache-2.0"
version = release = fedalign.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "api_pages",
    "command_line_page",
    "repository_links",
]
exclude_patterns = ["_build", "results", "**/.ipynb_checkpoints"]

# Markdown. Notebooks are stored with their outputs, and the tests run them; building the site runs nothing.
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True

# The API reference. Names are documented as users import them, from `fedalign`.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
maximum_signature_line_length = 88
autosummary_generate = False
default_role = "code"
toc_object_entries_show_parents = "hide"
copybutton_exclude = ".linenos, .gp, .go"
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!fedalign\.).*"),  # types of Python, NumPy, PyTorch …: their documentation is on the web
    (r"py:.*", r"fedalign\..*\.[a-z_]+"),  # modules and functions of the package that no user calls
    (r"py:class", r"fedalign\..*\._\w+"),  # private bases
]
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"fedalign\.")  # old names are documented too

html_theme = "furo"
html_title = f"FedALIGN {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00598c", "color-brand-content": "#00598c"},
    "dark_css_variables": {"color-brand-primary": "#6cb8e6", "color-brand-content": "#6cb8e6"},
}
