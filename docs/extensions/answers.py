"""Makes the site's search find a key, a metric or a phrase where it is explained.

- In tables whose first column has names in code, each row has an anchor and each name an entry in the index.
- `index_phrases` in conf.py gives more entries: phrases by page and heading.

Sphinx's search lists index entries first.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

_LOGGER = logging.getLogger(__name__)
_LONG = 8
"""Shorter last parts of a key, such as `name`, are parts of too many."""


class IndexTheAnswers(SphinxTransform):
    """Adds anchors and index entries to a page."""

    default_priority = 840  # before the index reads the page

    def apply(self, **kwargs: Any) -> None:
        """Add those of its tables and of `index_phrases`."""
        page = self.env.current_document.docname
        if any(fnmatch.fnmatch(page, pattern) for pattern in self.config.index_tables):
            for row in list(self.document.findall(nodes.row)):
                self._index_row(row)
        for heading, phrases in self.config.index_phrases.get(page, {}).items():
            sections = [node for node in self.document.findall(nodes.section) if heading in node["ids"]]
            if not sections:
                _LOGGER.warning("index_phrases names %s#%s, which is not there", page, heading)
            for section in sections:
                section.insert(1, _entries(phrases, heading))  # after its title

    def _index_row(self, row: nodes.row) -> None:
        names = list(row[0].findall(nodes.literal))
        if not names or isinstance(row.parent, nodes.thead):
            return
        anchor = re.sub(r"[^\w-]+", "-", names[0].astext()).strip("-")  # the search takes it for a selector
        if anchor in self.document.ids:
            return
        self.document.ids[anchor] = row
        row["ids"].append(anchor)
        paragraph = names[0].parent
        link = nodes.reference("", "", names[0].deepcopy(), refid=anchor, internal=True, classes=["row-name"])
        paragraph.replace(names[0], link)
        texts = [name.astext() for name in names]
        lasts = [text.rpartition(".")[2] for text in texts if "." in text]  # of `grpo.num_generations_per_prompt`
        paragraph.insert(0, _entries([*texts, *(last for last in lasts if len(last) >= _LONG)], anchor))


def _entries(names: list[str], anchor: str) -> addnodes.index:
    return addnodes.index(entries=[("single", name.replace(";", ","), anchor, "main", None) for name in names])


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the transform and its two values."""
    app.add_config_value("index_tables", [], "env")
    app.add_config_value("index_phrases", {}, "env")
    app.add_transform(IndexTheAnswers)
    return {"parallel_read_safe": True}
