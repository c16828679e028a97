"""What metrics call the data sets of a mixture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from nemo_offload_rl.keys.data import DataSource
from nemo_offload_rl.keys.data_source import FileKeys


def data_set_names(sources: Sequence[DataSource]) -> list[str]:
    """A name for each data set: of a file or folder its own, with that of the folder around it where two are alike.

    One of the hub is called by the second part of its name there, one that is known by name by that.

    The same data set twice, or two that are alike even so, are told apart by a number.
    """
    names = [_name(source, with_folder=False) for source in sources]
    alike = {name for name, count in Counter(names).items() if count > 1}
    names = [_name(source, with_folder=name in alike) for source, name in zip(sources, names, strict=True)]
    counts, seen = Counter(names), Counter[str]()
    for index, name in enumerate(names):
        seen[name] += 1
        if counts[name] > 1:
            names[index] = f"{name}_{seen[name]}"
    return names


def _name(source: DataSource, *, with_folder: bool) -> str:
    if not isinstance(source, FileKeys):
        return source.dataset_name
    path = Path(source.path)
    name = f"{path.parent.name}_{path.stem}" if with_folder else path.stem
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)
