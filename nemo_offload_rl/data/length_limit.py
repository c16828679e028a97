"""Rows of SFT and DPO that are longer than `data.max_input_seq_length`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from nemo_offload_rl.data.records import Example, ExamplePair
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.data import SupervisedDataKeys

logger = logging.getLogger(__name__)

_MASKED_TOKENS = 4  # of a row that keeps its place only; NeMo-RL keeps as many of each message


class LengthLimit:
    """Refuses, masks or leaves out what is too long, as `data.overlong_rows` says, and counts it.

    Args:
        settings: The keys `data.*`.
        data_set: Whose rows they are, for messages.
    """

    def __init__(self, settings: SupervisedDataKeys, data_set: str) -> None:
        self._settings = settings
        self._data_set = data_set
        self._overlong: list[str] = []

    def held(self, origin: str, examples: tuple[Example, ...]) -> tuple[Example, ...]:
        """What a row becomes: its sequences as they are, or if one is too long their beginnings, masked, or nothing.

        Raises:
            DataError: It is too long, and that is an error.
        """
        longest, limit = max(len(example.token_ids) for example in examples), self._settings.max_input_seq_length
        if longest <= limit:
            return examples
        if self._settings.overlong_rows == "error":
            raise DataError(
                f"{origin}: the sequence has {longest} tokens, more than data.max_input_seq_length={limit}; raise the "
                "limit, take the row out, or set data.overlong_rows=drop or mask"
            )
        self._overlong.append(origin)
        if self._settings.overlong_rows == "drop":
            return ()
        size = min(_MASKED_TOKENS, limit)
        return tuple(
            replace(
                example,
                token_ids=example.token_ids[:size],
                token_mask=example.token_mask[:size],
                loss_multiplier=0.0,
            )
            for example in examples
        )

    def checked[T: (Example, ExamplePair)](self, kept: Sequence[T], num_rows: int) -> tuple[T, ...]:
        """All that is kept of a data set; says how many rows were too long.

        Raises:
            DataError: All were.
        """
        if not self._overlong:
            return tuple(kept)
        limit = self._settings.max_input_seq_length
        if len(self._overlong) == num_rows:
            raise DataError(
                f"{self._overlong[0]}: this row and all others of {self._data_set} are longer than "
                f"data.max_input_seq_length={limit} tokens; raise the limit"
            )
        logger.warning(
            "%d of %d rows of %s are longer than data.max_input_seq_length=%d tokens, first %s: they are %s",
            len(self._overlong),
            num_rows,
            self._data_set,
            limit,
            self._overlong[0],
            "left out" if self._settings.overlong_rows == "drop" else "not trained on",
        )
        return tuple(kept)
