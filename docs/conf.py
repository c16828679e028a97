"""The documents as a site: `make docs`. Every warning is an error there and in tests/unit/test_docs.py."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent / "extensions")]

project = "nemo_offload_rl"
copyright = "the authors of nemo_offload_rl"  # the name that Sphinx reads
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "answers"]
exclude_patterns = ["_build"]

myst_heading_anchors = 4  # links such as page.md#heading, as GitHub makes them

autodoc_typehints = "none"  # signatures stay as they are written
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "special-members": "__call__"}
napoleon_use_ivar = True  # attributes stand in the docstring of their class, once
add_module_names = False
default_role = "code"  # docstrings have Markdown's single backticks

# What the search lists first (extensions/answers.py).
index_tables = ["reference/configuration/*", "reference/metrics", "guides/from-*"]
index_phrases = {
    "guides/troubleshooting": {
        "out-of-memory": ["out of memory", "OOM", "CUDA out of memory", "torch.OutOfMemoryError"],
        "runs-that-hang-and-processes-that-die": ["hang", "timeout", "NCCL timeout"],
    },
    "guides/memory": {"memory": ["GPU memory", "offload", "offloading"]},
    "guides/checkpoints": {"checkpoints": ["checkpoint", "resume"]},
    "guides/your-own-reward": {"your-own-reward": ["reward function", "reward"]},
    "start/data": {"your-own-data": ["dataset", "data set"]},
}

copybutton_prompt_text = "$ "
highlight_language = "none"  # blocks without a language are shown as they are
html_theme = "furo"
html_use_index = False  # the search has its entries
html_title = "nemo_offload_rl"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_copy_source = False
