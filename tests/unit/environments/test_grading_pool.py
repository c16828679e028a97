import multiprocessing
import operator
import os
import time

import pytest

from nemo_offload_rl.environments.grading_pool import Failed, GradingPool, TimedOut
from nemo_offload_rl.errors import WorkerDiedError


@pytest.fixture(scope="module")
def sleepers():
    pool = GradingPool(time.sleep, num_workers=2, timeout_s=1.0)
    yield pool
    pool.close()


def test_a_stuck_job_is_killed_and_all_others_still_get_their_outcome(sleepers):
    assert sleepers.map([(600,), (0,), (0.01,), (0,)]) == [TimedOut(), None, None, None]
    assert sleepers.map([(0,), (0,), (0,)]) == [None, None, None]


def test_a_job_that_raises_is_an_outcome_with_its_reason(sleepers):
    (failed,) = sleepers.map([(-1,)])
    assert isinstance(failed, Failed)
    assert "ValueError" in failed.reason


def test_no_jobs_give_no_outcomes(sleepers):
    assert sleepers.map([]) == []


def test_outcomes_keep_the_order_of_jobs():
    pool = GradingPool(operator.mul, num_workers=2, timeout_s=60.0)
    try:
        assert pool.map([(i, 10) for i in range(20)]) == [10 * i for i in range(20)]
    finally:
        pool.close()


def test_a_worker_that_dies_is_replaced_and_closing_leaves_no_process():
    others = set(multiprocessing.active_children())
    pool = GradingPool(os._exit, num_workers=1, timeout_s=60.0)
    outcomes = pool.map([(3,), (4,)])
    assert [outcome.reason for outcome in outcomes] == [
        "the grading process ended with exit code 3",
        "the grading process ended with exit code 4",
    ]
    pool.close()
    pool.close()
    assert set(multiprocessing.active_children()) == others


def test_a_worker_that_cannot_start_is_an_error_and_not_an_endless_restart():
    pool = GradingPool(os._exit, num_workers=1, timeout_s=60.0, warm_up=(7,))
    with pytest.raises(WorkerDiedError, match="exit code 7"):
        pool.map([(0,)])
    pool.close()
