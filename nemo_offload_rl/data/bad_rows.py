"""Rows that cannot be used: the first one ends the run, or all are left out and counted (`data.bad_rows`)."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from nemo_offload_rl.errors import DataError

logger = logging.getLogger(__name__)

_NUM_TOLD = 10


class BadRows:
    """Unusable rows of one data set.

    Args:
        way: The key `data.bad_rows`.
    """

    def __init__(self, way: Literal["error", "drop"] = "error") -> None:
        self._way = way
        self._faults: list[str] = []
        self._any_usable = False

    def usable[R, T](self, rows: Iterable[R], convert: Callable[[R], T]) -> Iterator[T]:
        """Convert rows, and leave out those for which that raises a `DataError`.

        Raises:
            DataError: A row cannot be used, and `data.bad_rows` is `error`.
        """
        for row in rows:
            try:
                made = convert(row)
            except DataError as error:
                if self._way == "error":
                    hint = "; or leave such rows out with data.bad_rows=drop" if self._any_usable else ""
                    raise DataError(f"{error}{hint}") from error
                self._faults.append(str(error))
            else:
                self._any_usable = True
                yield made

    def tell(self, data_set: str, num_left: int) -> None:
        """Log the number of rows that were left out, and the first of them.

        Args:
            data_set: Its name.
            num_left: Rows that are used.

        Raises:
            DataError: No row is left.
        """
        if not self._faults:
            return
        first, num_bad = self._faults[0], len(self._faults)
        if not num_left:
            raise DataError(f"{first} (no row of {data_set} is left: data.bad_rows=drop left out {num_bad})")
        told = "".join(f"\n  {fault}" for fault in self._faults[:_NUM_TOLD])
        more = f"\n  and {num_bad - _NUM_TOLD} more" if num_bad > _NUM_TOLD else ""
        logger.warning(
            "%d of %d rows of %s cannot be used and are left out (data.bad_rows=drop):%s%s",
            num_bad, num_bad + num_left, data_set, told, more,
        )  # fmt: skip
