"""The documents make a site without a warning, and what points into them finds its page and heading."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
POINTING = ("docs", "nemo_offload_rl", "tests", "examples", "benchmarks", "requirements", ".ci")
SUFFIXES = (".py", ".yaml", ".md", ".sh", "")

pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # Sphinx's to myst-parser


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> tuple[dict[str, set[str]], str, dict[str, set[str]]]:
    """Anchors of the headings of each page, every warning of the build, and pages and anchors of each index entry."""
    folder, warnings = tmp_path_factory.mktemp("site"), io.StringIO()
    with patch_docutils(DOCS), docutils_namespace():
        app = Sphinx(DOCS, DOCS, folder / "out", folder / "trees", "dummy", status=None, warning=warnings)
        app.build(force_all=True)
    anchors = {f"docs/{page}.md": set(about.get("myst_slugs", ())) for page, about in app.env.metadata.items()}
    index: dict[str, set[str]] = {}
    for page, entries in app.env.domains.index_domain.entries.items():
        for _, name, anchor, is_main, _ in entries:
            if is_main:
                index.setdefault(name, set()).add(f"{page}#{anchor}")
    return anchors, warnings.getvalue(), index


def test_the_site_is_built_without_a_warning_so_that_every_link_and_anchor_exists(site):
    assert site[1] == ""


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("out of memory", "guides/troubleshooting#out-of-memory"),
        ("num_generations", "guides/from-trl#num_generations"),
        ("grpo.num_generations_per_prompt", "reference/configuration/grpo#grpo-num_generations_per_prompt"),
        ("num_generations_per_prompt", "reference/configuration/grpo#grpo-num_generations_per_prompt"),
        ("train/kl", "reference/metrics#train-kl"),
    ],
)
def test_what_the_search_lists_first_is_where_it_is_explained(site, query, answer):
    assert answer in site[2][query]


def test_a_page_for_each_markdown_file(site):
    files = {f"docs/{path.relative_to(DOCS)}" for path in DOCS.rglob("*.md") if "_build" not in path.parts}
    assert files == set(site[0])


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_at_the_top_of_the_repository_lead_somewhere(name, site):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\s\"]+)", text)
    local = [link for link in links if "://" not in link]
    assert local
    assert broken(local, site[0]) == []


def test_paths_of_documents_in_code_messages_and_configurations_exist(site):
    files = [path for folder in POINTING for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    files += [ROOT / name for name in ("Makefile", "Dockerfile", "pyproject.toml")]
    wrong = []
    for path in files:
        if not path.is_file() or {"__pycache__", "_build"} & set(path.parts):
            continue
        named = re.findall(r"(?<![\w/.])docs/[\w/-]+\.(?:md|png|svg)(?:#[\w-]+)?", path.read_text(encoding="utf-8"))
        wrong += [f"{path.relative_to(ROOT)}: {link}" for link in broken(named, site[0])]
    assert wrong == []


def test_files_that_pages_name_in_code_exist():
    """`policy/worker.py` is looked for in the package too, a bare `test_rope.py` anywhere."""
    bare = {path.name for folder in POINTING for path in (ROOT / folder).rglob("*.py")}
    bare |= {path.name for path in (ROOT / "benchmarks/results").iterdir()}
    wrong = []
    for page in DOCS.rglob("*.md"):
        for name in re.findall(r"`([\w/.]+\.py|benchmarks/results/[\w.]+)`", page.read_text(encoding="utf-8")):
            places = (ROOT / name, ROOT / "nemo_offload_rl" / name)
            if not (name in bare if "/" not in name else any(place.is_file() for place in places)):
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_functions_that_pages_name_with_their_file_are_in_it():
    """`file.py` (`name`, `other`), below the package."""
    named = []
    for page in DOCS.rglob("*.md"):
        for file, names in re.findall(
            r"`([\w/]+\.py)`[ ,:]*\(?((?:`\w+`(?:, )?)+)\)", page.read_text(encoding="utf-8")
        ):
            named += [(page.name, file, name) for name in re.findall(r"`(\w+)`", names)]
    assert ("contributing.md", "algorithms/grpo.py", "step") in named
    texts = {file: (ROOT / "nemo_offload_rl" / file).read_text(encoding="utf-8") for _, file, _ in named}
    assert [one for one in named if not re.search(rf"(?:def|class) {one[2]}\b|^{one[2]} =", texts[one[1]], re.M)] == []


def broken(links: list[str], anchors: dict[str, set[str]]) -> list[str]:
    """Links from the top of the repository whose file is missing, or whose page lacks the anchor."""
    wrong = []
    for link in links:
        path, _, anchor = link.partition("#")
        if not (ROOT / path).exists() or (anchor and path in anchors and anchor not in anchors[path]):
            wrong.append(link)
    return wrong
