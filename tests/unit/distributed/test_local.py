import pytest

from nemo_offload_rl.distributed.local import LocalWorkerGroup


class Counter:
    def __init__(self):
        self.total = 0
        self.num_shutdowns = 0

    def add(self, value, times=1):
        self.total += value * times
        return self.total

    def fail(self):
        raise ArithmeticError("no")

    def shutdown(self):
        self.num_shutdowns += 1


def test_calls_run_on_the_one_worker_and_come_back_in_a_list():
    group = LocalWorkerGroup(Counter())
    assert group.world_size == 1
    assert group.run_all(Counter.add, 2, times=3) == [6]
    assert group.run_each(Counter.add, [(1,)]) == [7]
    assert group.start_all(Counter.add, 1)() == [8]


def test_an_error_keeps_its_type_and_arguments_for_more_ranks_are_refused():
    group = LocalWorkerGroup(Counter())
    with pytest.raises(ArithmeticError):
        group.run_all(Counter.fail)
    with pytest.raises(ValueError):
        group.run_each(Counter.add, [(1,), (2,)])


def test_shutting_down_twice_shuts_the_worker_down_once():
    worker = Counter()
    group = LocalWorkerGroup(worker)
    group.shutdown()
    group.shutdown()
    assert worker.num_shutdowns == 1
