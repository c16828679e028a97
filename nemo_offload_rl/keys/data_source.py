"""Keys that data sets have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator

from nemo_offload_rl.keys.section import doc, section


@section
class TaskKeys:
    """Keys of `data.default` that a data set may set for itself: how a row becomes a prompt, and who scores it.

    `config.convert.with_task_keys` fills in what it leaves out; what an algorithm has no use for is None.
    """

    prompt_file: Annotated[str | None, doc("As in `data.default`, for this data set.")] | None = None
    system_prompt_file: Annotated[str | None, doc("As in `data.default`, for this data set.")] | None = None
    processor: Annotated[str, doc("As in `data.default`, for this data set.")] | None = None
    env_name: Annotated[str, doc("As in `data.default`, for this data set.")] | None = None


def _share_or_count(size: float) -> float:
    if size >= 1 and size != int(size):
        raise ValueError("a share of the rows is below 1, and their number a whole one")
    return size


@section
class HeldOutKeys:
    """Rows of a data set that are kept for validation."""

    split_validation_size: Annotated[
        float,
        AfterValidator(_share_or_count),
        doc(
            "Rows held out for validation: a fraction if below 1, otherwise a number of rows. 0 or omitted holds "
            "out none, as `data.validation` requires.",
            ge=0,
        ),
    ] = 0.0
    seed: Annotated[int, doc("Seed for choosing those rows; if omitted: 42.", ge=0)] = 42


@dataclass(frozen=True, kw_only=True)
class GivenRows:
    """Rows of a data set that a script has given in place of a file's."""

    rows: Sequence[Mapping[str, Any]]


@section
class FileKeys(HeldOutKeys):
    """Keys of a data set that is read from disk or from the Hugging Face hub."""

    path: Annotated[
        str,
        doc(
            "A .jsonl, .json, .csv or .parquet file (the first three also as .gz), a folder of such files, a folder "
            "saved by `datasets`, or the name of a data set on the Hugging Face hub, such as `openai/gsm8k`, "
            "downloaded or read from the local cache.",
            min_length=1,
        ),
    ]
    subset: Annotated[str | None, doc("For hub data sets with several configurations: the one to use.")] = None
    split: Annotated[
        str | None,
        doc(
            "Split to use if there are several; in a folder of files, the prefix of their names. null if there is "
            "only one."
        ),
    ] = None


@section
class ToolKeys:
    """Tools of a row."""

    tool_key: Annotated[
        str | None,
        doc(
            "Row field with the tools that the assistant may call, for the chat template; if omitted: `tools`. null "
            "ignores tools. Rows without the field have none."
        ),
    ] = "tools"
