"""Offloaded activations: the same bits as without, little memory held, buffers that come back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_cases import BATCHES, PACKING, Row, steps
from model_families import save_family_folder
from policy_cases import assert_equal
from resume_cases import weights_of
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from nemo_offload_rl.backends.dtensor.activation_offload import ActivationOffloading
from nemo_offload_rl.models.families import DTENSOR
from nemo_offload_rl.protocols.loss import TrainResult

WIDTH, ROWS, NUM_LAYERS = 64, 32, 6
MIB = 1 << 20
CPU = torch.device("cpu")


class Block(nn.Module):
    """Keeps its input, twice, two views of one product, and what every block is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.raises = False

    def forward(self, hidden: Tensor, angles: Tensor) -> Tensor:
        left, right = self.into(hidden).chunk(2, dim=-1)
        if self.raises:
            raise ArithmeticError("in a layer")
        return hidden + self.out(torch.tanh(left) * right * angles)


def blocks(width: int = WIDTH) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(width) for _ in range(NUM_LAYERS))


def loss_of(layers: nn.ModuleList, hidden: Tensor, angles: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden, angles)
    return hidden.square().sum()


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def grads_of(layers: nn.ModuleList) -> list[Tensor]:
    found = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()
    return [grad for grad in found if grad is not None]


def expected(*seeds: int) -> list[Tensor]:
    layers = blocks()
    for seed in seeds:
        loss_of(layers, *batch(seed)).backward()
    return grads_of(layers)


def offloaded(limit_mib: int = 64, fraction: float = 1.0) -> tuple[nn.ModuleList, ActivationOffloading]:
    layers = blocks()
    return layers, ActivationOffloading(list(layers), fraction, limit_mib * MIB, CPU)


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) == 4 * NUM_LAYERS
    assert all(map(torch.equal, found, wanted))


def held_bytes(layers: nn.ModuleList) -> int:
    """Of the device's memory, what a forward pass leaves taken."""
    values = batch()
    loss_of(layers, *values).backward()  # takes the host's buffers
    what = {"activities": [ProfilerActivity.CPU], "profile_memory": True, "acc_events": True}
    with profile(**what) as seen, record_function("forward"):
        loss = loss_of(layers, *values)
    (found,) = (event for event in seen.key_averages() if event.key == "forward")
    loss.backward()
    return found.cpu_memory_usage


@pytest.mark.parametrize("fraction", [0.2, 0.5, 1.0])
def test_layers_that_are_offloaded_hold_nothing_between_their_passes(fraction: float) -> None:
    layers, _ = offloaded(fraction=fraction)
    activation_bytes = ROWS * WIDTH * 4
    # Of each layer the product, twice as wide, tanh, the input of `out`, and its own input; the first one's is ours.
    num_moved = {0.2: 1, 0.5: 3, 1.0: 5}[fraction]
    assert held_bytes(blocks()) - held_bytes(layers) == (5 * num_moved - 1) * activation_bytes


def test_gradients_have_the_same_bits_in_every_order_of_passes() -> None:
    layers, offloading = offloaded()
    loss_of(layers, *batch(1)).backward()
    assert_same(grads_of(layers), expected(1))
    # Two graphs at once, the older one first.
    first, second = (loss_of(layers, *batch(seed)) for seed in (1, 2))
    first.backward()
    second.backward()
    assert_same(grads_of(layers), expected(1, 2))
    # The same graph twice.
    loss = loss_of(layers, *batch(3))
    loss.backward(retain_graph=True)
    layers.zero_grad()
    loss.backward()
    assert_same(grads_of(layers), expected(3))
    # A pass without gradients between, and a graph that is dropped.
    loss = loss_of(layers, *batch(1))
    with torch.no_grad():
        loss_of(layers, *batch(2))
    del loss
    loss_of(layers, *batch(1)).backward()
    assert_same(grads_of(layers), expected(1))
    offloading.close()
    assert offloading.host_bytes == 0


def test_host_buffers_are_used_again_and_a_pass_that_raised_gives_them_back() -> None:
    layers, offloading = offloaded()
    loss_of(layers, *batch()).backward()
    taken_bytes = offloading.host_bytes
    assert taken_bytes > 0
    layers[3].raises = True
    for _ in range(3):
        with pytest.raises(ArithmeticError, match="in a layer"):
            loss_of(layers, *batch())
    layers[3].raises = False
    layers.zero_grad()
    for seed in (1, 2):
        loss_of(layers, *batch(seed)).backward()
    assert_same(grads_of(layers), expected(1, 2))
    assert offloading.host_bytes == taken_bytes
    offloading.close()
    assert offloading.host_bytes == 0


def test_what_does_not_fit_the_limit_stays_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    layers, offloading = offloaded(limit_mib=4)  # two buffers
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "nemo_offload_rl"):
            loss_of(layers, *batch()).backward()
        assert_same(grads_of(layers), expected(1))
        assert offloading.host_bytes == 4 * MIB
    assert caplog.text.count("Activations need more than 0.00 GiB of host memory; what does not fit stays") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_gradients_have_the_same_bits_and_the_memory_is_free_between_the_passes() -> None:
    width, rows, device = 2048, 4096, torch.device("cuda")
    activation_bytes = rows * width * 4
    plain, moving = blocks(width).to(device), blocks(width).to(device)
    offloading = ActivationOffloading(list(moving), 1.0, 2 << 30, device)

    def run(layers: nn.ModuleList) -> tuple[int, int, list[Tensor]]:
        for seed in (1, 2):
            torch.manual_seed(seed)
            values = torch.randn(rows, width, device=device), torch.randn(rows, width, device=device)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss = loss_of(layers, *values)
            held_bytes = torch.cuda.memory_allocated() - before
            loss.backward()
        return held_bytes, torch.cuda.max_memory_allocated() - before, grads_of(layers)

    (held, peak, wanted), (held_less, peak_less, found) = run(plain), run(moving)
    assert_same(found, wanted)
    # The same as on a CPU.
    assert held - held_less == (5 * (NUM_LAYERS - 1) - 1) * activation_bytes
    assert peak - peak_less > 10 * activation_bytes
    assert offloading.host_bytes > 20 * activation_bytes


CASES: dict[str, dict[str, Any]] = {
    "whole layers": {},
    "packed": {"sequence_packing": PACKING},
    "inputs of recomputed layers": {"activation_checkpointing": True},
    "packed, inputs of recomputed layers": {"activation_checkpointing": True, "sequence_packing": PACKING},
    "half": {"activation_offload_fraction": 0.5},
    "beside parameters in parts": {"cpu_offload": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["qwen3-tied", "gemma2-tied", "phi3", "qwen3_moe"])
def test_training_has_the_same_bits(tmp_path: Path, name: str, case: str) -> None:
    row = Row(name, DTENSOR, tmp_path / "model")
    save_family_folder(row.folder, name)

    def run(**changes: Any) -> tuple[list[TrainResult], dict[str, Tensor]]:
        with row.worker(**CASES[case], **changes) as worker:
            return steps(worker, BATCHES), weights_of(worker)

    wanted, found = run(), run(activation_offload=True)
    assert found[0] == wanted[0]
    assert_equal(found[1], wanted[1])
