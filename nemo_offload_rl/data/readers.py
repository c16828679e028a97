"""Rows of files on disk or of the Hugging Face hub, whatever their format, each with its place for error messages.

JSONL, JSON and CSV are read directly, compressed or not, and Parquet through pyarrow. The library `datasets` reads
folders that it saved, the hub (or its local cache without a network), and local copies of the hub's folders. A folder
of files is read in the order of their names.

A CSV file's cells stay text. `datasets` would guess types, and so read the answer 007 as 7 and NA as a missing value.
"""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from nemo_offload_rl.data.bad_rows import BadRows
from nemo_offload_rl.errors import DataError, first_line
from nemo_offload_rl.utils.hub import looking_up

_BYTE_ORDER_MARK = "\ufeff".encode()


@dataclass(frozen=True)
class Record:
    """The fields of one row, and its place: "train.jsonl:12" or "train.parquet, row 12"."""

    fields: Mapping[str, Any]
    origin: str


def read_records(
    path: Path,
    split: str | None = None,
    *,
    subset: str | None = None,
    columns: Sequence[str] | None = None,
    bad: BadRows | None = None,
) -> list[Record]:
    """All rows of a file, a folder, or a data set of the hub.

    Args:
        path: A file with an ending of `FORMATS`, a folder of such files, a folder that `datasets` saved, a copy of a
            folder of the hub, or if there is no such file a name on the hub.
        split: The split on the hub or of a saved `DatasetDict`, None for the only one; for a folder of files, how
            their names begin, None for all.
        subset: The part of a data set of the hub or of a copy; None for the only one.
        columns: The columns that are read of the hub; None for all.
        bad: Decides about rows that are no objects; None makes the first an error.

    Raises:
        DataError: Nothing can be read, or a row is no object; the message names file and line.
    """
    bad = bad or BadRows()
    if path.is_dir() and not _is_copy_of_hub(path, subset):
        records = _read_saved(path, split) if _is_saved(path) else _read_files(path, split, bad)
    elif path.is_dir() or (not path.exists() and is_hub_name(str(path))):
        said = ", ".join(name for name in (subset, split) if name is not None)
        where = f"{path} ({said})" if said else str(path)
        rows = _read_hub(str(path), subset, split, columns)
        records = [_table_record(row, f"{where}, row {number}") for number, row in enumerate(rows, start=1)]
    else:
        for name, value in (("split", split), ("subset", subset)):
            if value is not None:
                raise DataError(f"{path} is a file and has no {name} {value!r}; set `{name}` to null")
        records = list(_reader_of(path)(path, bad))
    if not records:
        bad.tell(str(path), num_left=0)
        raise DataError(f"data file {path} has no rows; add some, or name another `path`")
    return records


def _is_copy_of_hub(folder: Path, subset: str | None) -> bool:
    """Whether a folder has its files in folders below it, or has parts."""
    if subset is not None:
        return True
    files = [path for path in folder.rglob("*") if _format_of(path) in _READERS and path.is_file()]
    return bool(files) and not _is_saved(folder) and all(path.parent != folder for path in files)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))


def _read_jsonl(path: Path, bad: BadRows) -> Iterator[Record]:
    # Not splitlines: it also breaks lines at carriage returns, which are white space to JSON.
    lines = enumerate(_bytes_of(path).removeprefix(_BYTE_ORDER_MARK).split(b"\n"), start=1)
    return bad.usable(
        ((f"{path}:{number}", line) for number, line in lines if line.removeprefix(_BYTE_ORDER_MARK).strip()),
        lambda row: _of_jsonl(*row),
    )


def _of_jsonl(origin: str, line: bytes) -> Record:
    try:
        # The mark may stand in the middle of files that were put together from several.
        value = json.loads(line.removeprefix(_BYTE_ORDER_MARK).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{origin} is not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        where = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        fact = f"{origin} is not JSON ({_reason(error)}{where})"
        raise DataError(f"{fact}; put one object on each line") from error
    return _record(value, origin, "put one object on each line")


def _read_json(path: Path, bad: BadRows) -> Iterator[Record]:
    try:
        values = json.loads(_text_of(path))
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        where = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        fact = f"{path}{line} is not JSON ({_reason(error)}{where})"
        raise DataError(f"{fact}; write a list of objects, or name a .jsonl file") from error
    if not isinstance(values, list):
        raise DataError(f"{path} holds a JSON {type(values).__name__}; write a list of objects")
    rows = ((value, f"{path}, row {number}") for number, value in enumerate(values, start=1))
    return bad.usable(rows, lambda row: _record(*row, "make each entry an object"))


def _read_csv(path: Path, bad: BadRows) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)  # 128 KiB otherwise, which long prompts exceed
    lines = csv.reader(io.StringIO(_text_of(path), newline=""), strict=True)
    names = next(_cells(path, lines), ("", [""]))[1]
    if alike := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{path}:1 names the column {alike[0]!r} more than once; give each column its own name")
    return bad.usable(_cells(path, lines), lambda row: _of_csv(names, *row))


def _cells(path: Path, lines: Any) -> Iterator[tuple[str, list[str]]]:
    """The place and the cells of each row of a `csv.reader`, blank lines left out."""
    while True:
        origin = f"{path}:{lines.line_num + 1}"
        try:
            cells = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{origin} is not CSV ({first_line(error)}); correct the quotes") from error
        if cells:
            yield origin, cells


def _of_csv(names: Sequence[str], origin: str, cells: Sequence[str]) -> Record:
    if len(cells) != len(names):
        raise DataError(
            f"{origin}: the number of cells is {len(cells)}, but the first line names {len(names)} columns; write as "
            'many, and put cells that contain a comma, a line break or " in quotes'
        )
    return Record(dict(zip(names, cells, strict=True)), origin)


def _read_parquet(path: Path, bad: BadRows) -> Iterator[Record]:
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


_READERS: Mapping[str, Callable[[Path, BadRows], Iterator[Record]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".jsonl.gz": _read_jsonl,
    ".json.gz": _read_json,
    ".csv.gz": _read_csv,
}
FORMATS = ", ".join(_READERS)
"""Endings of files that can be read."""


def _format_of(path: Path) -> str:
    """The ending that tells a file's format, such as .jsonl or .jsonl.gz."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def _reader_of(path: Path) -> Callable[[Path, BadRows], Iterator[Record]]:
    if not path.exists():
        raise DataError(f"data file {path} cannot be read: No such file or directory; set `path` to one that exists")
    if _format_of(path) not in _READERS:
        raise DataError(
            f"data file {path} has the suffix {_format_of(path)!r}; name a file that ends in one of {FORMATS}"
        )
    return _READERS[_format_of(path)]


def _read_files(folder: Path, split: str | None, bad: BadRows) -> list[Record]:
    files = sorted(
        path for path in folder.iterdir() if _format_of(path) in _READERS and path.name.startswith(split or "")
    )
    if not files:
        begins = "" if split is None else f" whose name begins with {split!r}"
        raise DataError(
            f"data folder {folder} has no file{begins} that ends in one of {FORMATS}, and was not saved by "
            "`datasets`; correct `path` or `split`"
        )
    return [record for path in files for record in _reader_of(path)(path, bad)]


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
        raise DataError(f"{origin} has half of a surrogate pair ({bad}), which is not text; take it out") from error
    return Record(value, origin)


def _table_record(row: Mapping[str, Any], origin: str) -> Record:
    return Record(plain_row(row), origin)


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a table in the types of JSON, without the fields of nested objects that are None.

    Tables give every object of a column all fields of any. Decimals become numbers.
    """
    return {key: _plain(value) for key, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, Decimal):
        return _number(value)
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


def _number(value: Decimal) -> int | float | str:
    """An integer if it is one, a float if that has the same digits, else the digits as text."""
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def _text_of(path: Path) -> str:
    try:
        return _bytes_of(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"data file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _bytes_of(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"data file {path} cannot be decompressed ({first_line(error)}); check that it is whole"
        ) from error
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror}; correct `path` or its rights") from error


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
    return _NAME.fullmatch(path) is not None and not path.endswith(tuple(_READERS))


def _read_hub(
    path: str, subset: str | None, split: str | None, columns: Sequence[str] | None
) -> Iterator[Mapping[str, Any]]:
    """Rows of a data set of the hub or of a copy; see `read_records`."""
    said = f"{path}{f' ({subset})' if subset else ''}"
    with looking_up(path):
        import datasets  # heavy, and reads HF_HUB_OFFLINE once
        from datasets.exceptions import DatasetsError

        try:
            # The split is asked for by name, since it is then the only one that is prepared.
            loaded = datasets.load_dataset(path, subset, split=split)
        except (OSError, ValueError, DatasetsError) as error:  # the hub's own errors are OSErrors
            reason = " ".join(str(error).splitlines()[:2]) or "no reason given"
            raise DataError(
                f"data set {said} is not a file or folder here and cannot be loaded from the hub "
                f"({type(error).__name__}: {reason}); correct `path`, `subset` or `split`, connect to the Hugging Face "
                "hub once, or set `path` to a file or folder with the same columns"
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
