"""Buckets that stay on GPUs: what travels about them (CPU), and the bytes themselves (GPU)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec
import pytest
import torch
from refit_process import buckets_of, specs_of, weights
from torch import Tensor

from nemo_offload_rl.generation.vllm.wire import bucket_from_wire, bucket_to_wire
from nemo_offload_rl.protocols.refit import RefitError, TensorSlice, WeightBucket
from nemo_offload_rl.weight_sync.cuda_ipc import (
    CudaIpcHandle,
    CudaIpcReceiver,
    CudaIpcSender,
    SharedBuffer,
    join_handles,
)
from nemo_offload_rl.weight_sync.nccl import NcclHandle
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryHandle

SLICES = (TensorSlice("a", (2, 3), torch.bfloat16, 0), TensorSlice("b", (), torch.float32, 512))
gpu = pytest.mark.gpu


def bucket(transport: str, handle: object) -> WeightBucket:
    return WeightBucket(4, transport, handle, 516, SLICES, True)


def shared(name: str) -> SharedBuffer:
    return SharedBuffer(name.encode() * 8, 1 << 20, 512, b"counter", 8, b"event", True)


def test_every_kind_of_bucket_survives_the_message_to_the_engines_workers():
    handles = {
        "shared_memory": SharedMemoryHandle(1, 2, 3, 4),
        "cuda_ipc": CudaIpcHandle({"gpu-0": shared("x"), "gpu-1": shared("y")}),
        "nccl": NcclHandle(),
    }
    for transport, handle in handles.items():
        sent = bucket(transport, handle)
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(bucket_to_wire(sent)))
        assert bucket_from_wire(message) == sent


def test_the_buffers_of_all_ranks_are_joined_and_other_transports_have_one_sender():
    ranks = [bucket("cuda_ipc", CudaIpcHandle({f"gpu-{rank}": shared(str(rank))})) for rank in range(3)]
    joined = join_handles(ranks)
    assert joined is not None
    assert isinstance(joined.handle, CudaIpcHandle)
    assert joined.handle.buffers == {f"gpu-{rank}": shared(str(rank)) for rank in range(3)}
    assert joined.slices == SLICES
    first = bucket("shared_memory", SharedMemoryHandle(1, 2, 3, 4))
    assert join_handles([first, bucket("none", None)]) is first
    assert join_handles([None, None]) is None


def test_a_view_has_the_bytes_shape_and_type_of_its_slice():
    buffer = torch.zeros(1024, dtype=torch.uint8)
    SLICES[0].of(buffer).copy_(torch.arange(6.0).view(2, 3))
    SLICES[1].of(buffer).copy_(torch.tensor(0.25))
    assert buffer[:12].view(torch.bfloat16).tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer[512:516].view(torch.float32).tolist() == [0.25]
    empty = TensorSlice("e", (0, 5), torch.float32, 1024)
    assert empty.of(buffer).shape == (0, 5)


def send(pipe: Connection) -> None:
    """For each (buffer size, seeds): refits of one sender; then what is left on the device after each."""
    device = torch.device("cuda", 0)
    while (order := pipe.recv()) is not None:
        buffer_bytes, seeds = order
        sender = CudaIpcSender(specs_of(weights(0)), buffer_bytes, device)
        for seed in seeds:
            sender.start((name, tensor.to(device)) for name, tensor in weights(seed).items())
            for filled in buckets_of(sender):  # type: ignore[arg-type]
                pipe.send(filled)
                pipe.recv()
            pipe.send(None)
            pipe.recv()  # the receiver has closed
            sender.release()
            pipe.send(torch.cuda.memory_allocated(device))
        sender.close()


def send_one_bucket(pipe: Connection) -> None:
    """The first bucket of a refit that is given up; then what is left on the device."""
    device = torch.device("cuda", 0)
    sender = CudaIpcSender(specs_of(weights(0)), 600, device)
    sender.start((name, tensor.to(device)) for name, tensor in weights(0).items())
    pipe.send(sender.next_bucket())
    pipe.recv()  # the receiver has been killed
    sender.close()
    pipe.send(torch.cuda.memory_allocated(device))


def open_one_bucket(pipe: Connection) -> None:
    """Open the buffer of a bucket and keep it."""
    receiver = CudaIpcReceiver()
    views = dict(receiver.tensors(pipe.recv()))
    pipe.send(len(views))
    pipe.recv()


@contextmanager
def process(target: Callable[[Connection], None]) -> Iterator[tuple[Connection, BaseProcess]]:
    """A process and a pipe to it; killed at the end."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=target, args=(there,))
    child.start()
    there.close()
    yield here, child
    child.kill()
    child.join(1500)


@pytest.fixture(scope="module")
def pipe():
    with process(send) as (connection, _):
        yield connection


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("buffer_bytes", [1, 600, 3000, 2**24])
def test_tensors_arrive_bitwise_and_the_senders_memory_is_free_afterwards(pipe: Connection, buffer_bytes: int) -> None:
    seeds = (3, 4, 5)
    pipe.send((buffer_bytes, seeds))
    for seed in seeds:
        receiver = CudaIpcReceiver()
        arrived: dict[str, Tensor] = {}
        while (sent := pipe.recv()) is not None:
            arrived |= {name: tensor.cpu() for name, tensor in receiver.tensors(sent)}
            pipe.send("loaded")
        receiver.close()
        pipe.send("closed")
        assert pipe.recv() == 0
        expected = weights(seed)
        assert list(arrived) == list(expected)
        assert all(torch.equal(arrived[name], expected[name]) for name in expected)


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_senders_memory_is_free_after_its_receiver_was_killed_with_a_buffer_open():
    with process(send_one_bucket) as (sender, _), process(open_one_bucket) as (receiver, engine):
        receiver.send(sender.recv())
        assert receiver.recv() > 0
        engine.kill()
        engine.join(1500)
        sender.send("killed")
        assert sender.recv() == 0


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_engine_on_a_gpu_where_nobody_sends_is_told_so():
    elsewhere = bucket("cuda_ipc", CudaIpcHandle({"another-gpu": shared("x")}))
    with pytest.raises(RefitError, match=r"No policy worker sends weights on this engine's GPU .* another-gpu"):
        next(CudaIpcReceiver().tensors(elsewhere))
