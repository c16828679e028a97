from __future__ import annotations

from typing import Any

import pytest

from nemo_offload_rl.algorithms.rollout_sampler import AwakeEngine
from nemo_offload_rl.errors import DataError, WorkerDiedError
from nemo_offload_rl.utils.timer import PhaseTimer


@pytest.mark.parametrize(
    ("error", "is_the_same", "expected"),
    [
        (None, True, None),
        (RuntimeError("a bug"), True, RuntimeError),
        (DataError("an empty prompt"), True, DataError),
        (DataError("an empty prompt"), False, DataError),
        # It was ended in the middle, or is another one, which has no weights yet.
        (RuntimeError("the workers were shut down"), False, WorkerDiedError),
    ],
)
def test_what_an_engine_that_is_started_again_says_of_old_rollouts_counts_as_its_death(error, is_the_same, expected):
    now = True
    engine: Any = None
    awake = AwakeEngine(engine, PhaseTimer(), lambda: now)

    def work() -> str:
        nonlocal now
        now = is_the_same
        if error is not None:
            raise error
        return "said"

    if expected is None:
        assert awake.serve(work, phase="generation") == "said"
    else:
        with pytest.raises(expected):
            awake.serve(work, phase="generation")


def test_an_engine_that_was_started_again_is_not_asked_for_a_further_turn():
    asked = []
    engine: Any = None
    awake = AwakeEngine(engine, PhaseTimer(), lambda: False)
    with pytest.raises(WorkerDiedError):
        awake.serve(lambda: asked.append(1), phase="generation")
    assert asked == []
