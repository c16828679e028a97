"""Data sets of the Hugging Face hub."""

from __future__ import annotations

from nemo_offload_rl.data.config import OpenMathInstruct2Config
from nemo_offload_rl.data.records import Row, Splits
from nemo_offload_rl.data.rows import split_by
from nemo_offload_rl.errors import DataError

_OPEN_MATH = "nvidia/OpenMathInstruct-2"


def load_open_math_instruct_2(settings: OpenMathInstruct2Config) -> Splits[Row]:
    """Problems and expected answers of nvidia/OpenMathInstruct-2 (arXiv 2410.01560), from the hub or its local cache.

    Raises:
        DataError: Neither the hub nor the cache has it.
    """
    import datasets  # heavy: only when this data set is asked for

    try:
        table = datasets.load_dataset(_OPEN_MATH, split=settings.split)
    except (OSError, ValueError) as error:  # offline and not cached; the hub's own error classes are OSErrors
        raise DataError(
            f"data set {_OPEN_MATH} cannot be loaded ({type(error).__name__}: {str(error).splitlines()[0]}); connect "
            f"to the Hugging Face hub once, or use dataset_name=ResponseDataset with a local file"
        ) from error
    rows = [
        Row(question=problem, answer=answer, origin=f"{_OPEN_MATH}:{index}")
        for index, (problem, answer) in enumerate(zip(table["problem"], table["expected_answer"], strict=True))
    ]
    return split_by(rows, lambda row: row.question, share=settings.split_validation_size, seed=settings.seed)
