from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from forked import context
from refit_process import buckets_of, send_until_told, specs_of, weights
from torch import Tensor

from nemo_offload_rl.protocols.refit import RefitError
from nemo_offload_rl.weight_sync.sender import DiscardingSender
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender


@contextmanager
def sending_process() -> Iterator[Connection]:
    pipe, child_pipe = context().Pipe()
    child = context().Process(target=send_until_told, args=(child_pipe,))
    child.start()
    child_pipe.close()
    yield pipe
    child.kill()
    child.join(1500)


@pytest.fixture(scope="module")
def pipe() -> Iterator[Connection]:
    with sending_process() as connection:
        yield connection


@pytest.mark.processes
@pytest.mark.parametrize("buffer_bytes", [1, 600, 3000, 2**20])
def test_tensors_arrive_bitwise_from_another_process_in_every_refit(pipe: Connection, buffer_bytes: int) -> None:
    receiver = SharedMemoryReceiver()
    seeds = (3, 4)
    pipe.send((buffer_bytes, seeds))
    for seed in seeds:
        arrived: dict[str, Tensor] = {}
        while (bucket := pipe.recv()) is not None:
            arrived |= {name: tensor.clone() for name, tensor in receiver.tensors(bucket)}
            pipe.send("loaded")
        expected = weights(seed)
        assert list(arrived) == list(expected)
        for name, tensor in expected.items():
            assert arrived[name].dtype == tensor.dtype
            assert torch.equal(arrived[name], tensor), name


def test_a_bucket_keeps_its_bytes_while_the_next_one_is_filled() -> None:
    tensors = {str(i): torch.full((100,), float(i)) for i in range(5)}
    sender = SharedMemorySender(specs_of(tensors), buffer_bytes=400)
    sender.start(iter(tensors.items()))
    receiver = SharedMemoryReceiver()
    previous: Tensor | None = None
    for i, bucket in enumerate(buckets_of(sender)):
        assert bucket.index == i
        assert bucket.is_last == (i == 4)
        if previous is not None:
            assert torch.equal(previous, torch.full((100,), i - 1.0))
        ((_, previous),) = receiver.tensors(bucket)
    sender.close()
    sender.close()


@pytest.mark.processes
def test_a_killed_sender_leaves_nothing_and_the_reader_says_so() -> None:
    before = set(os.listdir("/dev/shm"))
    with sending_process() as pipe:
        pipe.send((2**20, (0,)))
        bucket = pipe.recv()
        assert not [name for name in set(os.listdir("/dev/shm")) - before if "refit" in name]
    with pytest.raises(RefitError, match=rf"process {bucket.handle.pid} cannot be opened .*policy worker died"):
        list(SharedMemoryReceiver().tensors(bucket))


def test_a_closed_buffer_is_not_taken_for_another_file() -> None:
    tensors = weights(0)
    sender = SharedMemorySender(specs_of(tensors), 2**20)
    sender.start(iter(tensors.items()))
    bucket = sender.next_bucket()
    assert bucket is not None
    sender.close()
    with open("/dev/null") as other:  # most likely takes the descriptor's number
        assert other
        with pytest.raises(RefitError, match=r"closed before it was read|cannot be opened"):
            list(SharedMemoryReceiver().tensors(bucket))


def test_a_closed_receiver_maps_nothing() -> None:
    def num_maps() -> int:
        return Path("/proc/self/maps").read_text().count("nemo_offload_rl_refit")

    gc.collect()  # buffers of workers that other tests of this process have dropped
    before = num_maps()
    tensors = weights(0)
    sender = SharedMemorySender(specs_of(tensors), 2**20)
    sender.start(iter(tensors.items()))
    bucket = sender.next_bucket()
    assert bucket is not None

    own = num_maps()
    assert own > before
    receiver = SharedMemoryReceiver()
    assert len(list(receiver.tensors(bucket))) == len(tensors)
    assert num_maps() == own + 1
    receiver.close()
    assert num_maps() == own
    sender.close()
    assert num_maps() == before


def sender_for(announced: dict[str, Tensor], sent: list[tuple[str, Tensor]]) -> SharedMemorySender:
    sender = SharedMemorySender(specs_of(announced), buffer_bytes=1024)
    sender.start(iter(sent))
    return sender


def test_what_was_not_announced_is_refused_by_name() -> None:
    one, two = ("one", torch.ones(3)), ("two", torch.ones(4))
    announced = dict([one, two])
    cases = {
        "The policy sent no two": [one],
        "one is missing or out of order: the policy sent two": [two, one],
        "the unexpected tensor three where two was announced": [one, ("three", torch.ones(4))],
        "the unexpected tensor three after the last announced one": [one, two, ("three", torch.ones(4))],
        r"two was announced as \[4\] torch.float32, but the policy sent \[5\]": [one, ("two", torch.ones(5))],
        r"but the policy sent \[4\] torch.bfloat16": [one, ("two", torch.ones(4).bfloat16())],
    }
    for message, sent in cases.items():
        with pytest.raises(RefitError, match=message):
            list(buckets_of(sender_for(announced, sent)))


def test_a_sender_that_failed_can_start_again() -> None:
    tensors = weights(0)
    sender = sender_for(tensors, [])
    with pytest.raises(RefitError):
        sender.next_bucket()
    sender.start(iter(tensors.items()))
    assert sum(len(bucket.slices) for bucket in buckets_of(sender)) == len(tensors)


def test_ranks_that_send_nothing_take_the_same_tensors_at_each_call() -> None:
    tensors = weights(0)
    taken: dict[str, list[int]] = {"sending": [], "discarding": []}
    for name, kind in (("sending", SharedMemorySender), ("discarding", DiscardingSender)):
        sender = kind(specs_of(tensors), 3000)
        walked: list[str] = []
        sender.start((walked.append(key) or (key, tensor)) for key, tensor in tensors.items())
        for _ in buckets_of(sender):
            taken[name].append(len(walked))
    assert taken["sending"] == taken["discarding"]
    assert len(taken["sending"]) > 1
