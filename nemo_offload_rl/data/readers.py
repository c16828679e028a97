"""Rows of files on disk or of the Hugging Face hub, whatever their format, each with its place for error messages.

JSONL and JSON are read directly, Parquet through pyarrow. The library `datasets` reads folders that it saved, the hub
(or its local cache without a network), and local copies of the hub's folders. A folder of files is read in the order of
their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_offload_rl.errors import DataError, first_line

_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Record:
    """The fields of one row, and its place: "train.jsonl:12" or "train.parquet, row 12"."""

    fields: Mapping[str, Any]
    origin: str


def read_records(
    path: Path, split: str | None = None, *, subset: str | None = None, columns: Sequence[str] | None = None
) -> list[Record]:
    """All rows of a file, a folder, or a data set of the hub.

    Args:
        path: A .jsonl, .json or .parquet file, a folder of such files, a folder that `datasets` saved, a copy of a
            folder of the hub, or if there is no such file a name on the hub.
        split: The split on the hub or of a saved `DatasetDict`, None for the only one; for a folder of files, how
            their names begin, None for all.
        subset: The part of a data set of the hub or of a copy; None for the only one.
        columns: The columns that are read of the hub; None for all.

    Raises:
        DataError: Nothing can be read, or a row is no object; the message names file and line.
    """
    if path.is_dir() and not _is_copy_of_hub(path, subset):
        records = _read_saved(path, split) if _is_saved(path) else _read_files(path, split)
    elif path.is_dir() or (not path.exists() and is_hub_name(str(path))):
        said = ", ".join(name for name in (subset, split) if name is not None)
        where = f"{path} ({said})" if said else str(path)
        rows = _read_hub(str(path), subset, split, columns)
        records = [_table_record(row, f"{where}, row {number}") for number, row in enumerate(rows, start=1)]
    else:
        for name, value in (("split", split), ("subset", subset)):
            if value is not None:
                raise DataError(f"{path} is a file and has no {name} {value!r}; set `{name}` to null")
        records = list(_reader_of(path)(path))
    if not records:
        raise DataError(f"data file {path} has no rows; add some, or name another `path`")
    return records


def _is_copy_of_hub(folder: Path, subset: str | None) -> bool:
    """Whether a folder has its files in folders below it, or has parts."""
    if subset is not None:
        return True
    files = [path for path in folder.rglob("*") if path.suffix in _READERS and path.is_file()]
    return bool(files) and not _is_saved(folder) and all(path.parent != folder for path in files)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))


def _read_jsonl(path: Path) -> Iterator[Record]:
    # Not splitlines: it also breaks lines at U+2028, U+0085 and the like, which JSON allows inside a string.
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        line = line.removeprefix(_BYTE_ORDER_MARK)  # of files that were put together from several
        if line.strip():
            origin = f"{path}:{number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                where = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
                fact = f"{origin} is not JSON ({_reason(error)}{where})"
                raise DataError(f"{fact}; put one object on each line") from error
            yield _record(value, origin, "put one object on each line")


def _read_json(path: Path) -> Iterator[Record]:
    try:
        values = json.loads(_text_of(path))
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        where = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        fact = f"{path}{line} is not JSON ({_reason(error)}{where})"
        raise DataError(f"{fact}; write a list of objects, or name a .jsonl file") from error
    if not isinstance(values, list):
        raise DataError(f"{path} holds a JSON {type(values).__name__}; write a list of objects")
    for number, value in enumerate(values, start=1):
        yield _record(value, f"{path}, row {number}", "make each entry an object")


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow  # here, since it takes a moment
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"data file {path} cannot be read as Parquet ({first_line(error)}); check that it is whole"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield _table_record(row, f"{path}, row {number}")


_READERS: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _reader_of(path: Path) -> Callable[[Path], Iterator[Record]]:
    if not path.exists():
        raise DataError(f"data file {path} cannot be read: No such file or directory; set `path` to one that exists")
    if path.suffix not in _READERS:
        known = ", ".join(_READERS)
        raise DataError(f"data file {path} has the suffix {path.suffix!r}; name a file that ends in one of {known}")
    return _READERS[path.suffix]


def _read_files(folder: Path, split: str | None) -> list[Record]:
    files = sorted(path for path in folder.iterdir() if path.suffix in _READERS and path.name.startswith(split or ""))
    if not files:
        begins = "" if split is None else f" whose name begins with {split!r}"
        raise DataError(
            f"data folder {folder} has no .jsonl, .json or .parquet file{begins} and is none that `datasets` saved; "
            "correct `path` or `split`"
        )
    return [record for path in files for record in _reader_of(path)(path)]


def _read_saved(folder: Path, split: str | None) -> list[Record]:
    import datasets  # heavy: only where such a folder is asked for

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(
            f"data folder {folder} cannot be read by `datasets` ({first_line(error)}); save it again with save_to_disk"
        ) from error
    where = str(folder)
    if isinstance(loaded, datasets.DatasetDict):
        known = ", ".join(map(str, loaded))
        if split is None or split not in loaded:
            asked = "no split is named" if split is None else f"there is no split {split!r}"
            raise DataError(
                f"data folder {folder} has the splits {known}, and {asked}; set `split` to one of them, or `path` "
                "to the folder of one"
            )
        loaded, where = loaded[split], f"{folder} ({split})"
    elif split is not None:
        raise DataError(f"data folder {folder} holds one data set without splits, not {split!r}; set `split` to null")
    return [_table_record(dict(row), f"{where}, row {number}") for number, row in enumerate(loaded, start=1)]


def _record(value: Any, origin: str, fix: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{origin} holds a JSON {type(value).__name__}; {fix}")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        bad = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(f"{origin} has half of a surrogate pair ({bad}), which is no text; take it out") from error
    return Record(value, origin)


def _table_record(row: Mapping[str, Any], origin: str) -> Record:
    return Record({key: _without_fillers(value) for key, value in row.items()}, origin)


def _without_fillers(value: Any) -> Any:
    """Drop fields that are None: tables give every object of a column all fields of any."""
    if isinstance(value, Mapping):
        return {key: _without_fillers(entry) for key, entry in value.items() if entry is not None}
    return [_without_fillers(entry) for entry in value] if isinstance(value, list) else value


def _text_of(path: Path) -> str:
    try:
        # newline="": a lone carriage return is white space to JSON, not the end of a line.
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.read()
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror}; correct `path` or its rights") from error
    except UnicodeDecodeError as error:
        raise DataError(f"data file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _reason(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return error.msg
        case RecursionError():
            return "nested too deeply"
    return first_line(error)


_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")


def is_hub_name(path: str) -> bool:
    """Whether a path that does not exist may name a data set: `owner/name`, or `name` for a very old one."""
    return _NAME.fullmatch(path) is not None and not path.endswith((".json", ".jsonl", ".parquet"))


def _read_hub(
    path: str, subset: str | None, split: str | None, columns: Sequence[str] | None
) -> Iterator[Mapping[str, Any]]:
    """Rows of a data set of the hub or of a copy; see `read_records`."""
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
