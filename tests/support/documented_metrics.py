"""The tables of docs/reference/metrics.md: names, which may hold placeholders such as `<k>`, below their headings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs/reference/metrics.md"


def documented(*headings: str) -> set[str]:
    """Names in the tables below the headings; without headings all of the document's."""
    sections = re.split(r"^## (.*)\n", DOCUMENT.read_text(), flags=re.MULTILINE)
    by_heading = dict(zip(sections[1::2], sections[2::2], strict=True))
    texts = [by_heading[heading] for heading in headings or by_heading]
    return {name for text in texts for name in re.findall(r"^\| `([^`/]+/[^`]+)` \|", text, flags=re.MULTILINE)}


def pattern(name: str) -> re.Pattern[str]:
    """What matches the metrics that a name with placeholders stands for."""
    parts = re.split(r"<[^>]+>", name)
    return re.compile("[^/]+".join(map(re.escape, parts)))


def without_match(names: Iterable[str], others: Iterable[str]) -> set[str]:
    """Names that match none of the others; on either side there may be placeholders."""
    others = set(others)
    patterns = [pattern(other) for other in others]
    return {
        name
        for name in names
        if not any(found.fullmatch(name) for found in patterns)
        and not any(pattern(name).fullmatch(other) for other in others)
    }
