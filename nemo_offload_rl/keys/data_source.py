"""Keys that several data sets have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator

from nemo_offload_rl.keys.section import doc, section


@section
class TaskKeys:
    """Keys of `data.default` that a data set may set for itself: how a row becomes a prompt, and who scores it.

    `config.convert.with_task_keys` sets those that it leaves out; keys that an algorithm does not have are None.
    """

    prompt_file: Annotated[str | None, doc("As in `data.default`, for this data set.")] | None = None
    system_prompt_file: Annotated[str | None, doc("As in `data.default`, for this data set.")] | None = None
    processor: Annotated[str, doc("As in `data.default`, for this data set.")] | None = None
    env_name: Annotated[str, doc("As in `data.default`, for this data set.")] | None = None


def _share_or_count(size: float) -> float:
    if size >= 1 and size != int(size):
        raise ValueError("a fraction below 1, or a whole number of rows")
    return size


@section
class HeldOutKeys:
    """Rows of a data set that are kept for validation."""

    split_validation_size: Annotated[
        float,
        AfterValidator(_share_or_count),
        doc(
            "Rows held out for validation: a fraction if below 1, otherwise a number of rows. Must be 0 in "
            "`data.validation`.",
            ge=0,
        ),
    ] = 0.0
    seed: Annotated[int, doc("Seed for choosing those rows.", ge=0)] = 42


@dataclass(frozen=True, kw_only=True)
class GivenRows:
    """Rows that a script gives in place of a file."""

    rows: Sequence[Mapping[str, Any]]


@section
class FileKeys(HeldOutKeys):
    """Keys of a data set on disk or on the Hugging Face hub."""

    path: Annotated[
        str,
        doc(
            "A .jsonl, .json, .csv or .parquet file (the first three also as .gz), a folder of such files, a folder "
            "saved by `datasets`, or the name of a data set on the Hugging Face hub, such as `openai/gsm8k`, "
            "downloaded or read from the local cache.",
            min_length=1,
        ),
    ]
    subset: Annotated[str | None, doc("Configuration to use, of a data set on the hub that has several.")] = None
    split: Annotated[
        str | None,
        doc(
            "Split to use if there are several; in a folder of files, the beginning of their names. null if there is "
            "only one."
        ),
    ] = None


@section
class ToolKeys:
    """Key of data sets whose rows may have tools."""

    tool_key: Annotated[
        str | None,
        doc(
            "Row field with the tools that the assistant may call, which the chat template shows. Rows without the "
            "field have no tools; null ignores tools."
        ),
    ] = "tools"
