"""Rows of the Hugging Face hub, or of its local cache where there is no network; `datasets` does the work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_offload_rl.errors import DataError

_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")


def is_hub_name(path: str) -> bool:
    """Whether a path that does not exist may be the name of a data set: `owner/name`, or `name` of a very old one."""
    return _NAME.fullmatch(path) is not None and not path.endswith((".json", ".jsonl", ".parquet"))


def read_table(
    path: str, subset: str | None, split: str | None, columns: Sequence[str] | None = None
) -> Iterator[Mapping[str, Any]]:
    """Rows of a data set, all of them or some of their columns.

    Args:
        path: A name on the hub, or a folder with the files of one.
        subset: The part of it; None for the only one, or the one that it has as a default.
        split: Its split; None for the only one.
        columns: None for all.

    Raises:
        DataError: Neither the hub nor the cache has it, or it has no such part, split or column.
    """
    import datasets  # heavy: only when it is needed
    from datasets.exceptions import DatasetsError

    said = f"{path}{f' ({subset})' if subset else ''}"
    try:
        # The split is asked for by name, since it is then the only one that is prepared.
        loaded = datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError, DatasetsError) as error:  # the hub's own errors are OSErrors
        reason = " ".join(str(error).splitlines()[:2]) or "no reason given"
        raise DataError(
            f"data set {said} is no file or folder here and cannot be loaded from the hub ({type(error).__name__}: "
            f"{reason}); correct `path`, `subset` or `split`, connect to the Hugging Face hub once, or set `path` to a "
            "file or folder with the same columns"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if len(loaded) > 1:
            known = ", ".join(map(str, loaded))
            raise DataError(
                f"data set {said} has the splits {known}, and no split is named; set `split` to one of them"
            )
        (loaded,) = loaded.values()
    assert isinstance(loaded, datasets.Dataset), type(loaded)
    if columns is not None:
        if absent := [column for column in columns if column not in loaded.column_names]:
            raise DataError(
                f"data set {said} has no column {absent[0]!r} (columns: {', '.join(loaded.column_names)}); set `path` "
                "to one that has"
            )
        loaded = loaded.select_columns(list(columns))
    for batch in loaded.iter(batch_size=1000):
        assert isinstance(batch, dict), type(batch)
        names = list(batch)
        yield from (dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True))
