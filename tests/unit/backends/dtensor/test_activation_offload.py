"""Offloaded inputs of layers: the same bits as without, little memory held, host memory that is used again."""

from __future__ import annotations

import logging
from functools import partial
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
from torch.utils.checkpoint import checkpoint

from nemo_offload_rl.backends.dtensor.activation_offload import ActivationOffloading
from nemo_offload_rl.models.families import DTENSOR
from nemo_offload_rl.protocols.loss import TrainResult

WIDTH, ROWS, NUM_LAYERS = 64, 32, 6
MIB = 1 << 20
INPUT_BYTES = ROWS * WIDTH * 4
CPU = torch.device("cpu")


class Block(nn.Module):
    """A checkpointed layer, as `transformers` has them: it is given hidden states, and what every layer is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.raises = False
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def __call__(self, hidden: Tensor, angles: Tensor) -> Tensor:
        return self._gradient_checkpointing_func(partial(super().__call__, angles=angles), hidden)

    def forward(self, hidden: Tensor, angles: Tensor) -> Tensor:
        left, right = self.into(hidden).chunk(2, dim=-1)
        if self.raises:
            raise ArithmeticError("in a layer")
        return hidden + self.out(torch.tanh(left) * right * angles)


def blocks(width: int = WIDTH) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(width) for _ in range(NUM_LAYERS))


def loss_of(layers: nn.ModuleList, hidden: Tensor, angles: Tensor) -> Tensor:
    hidden = hidden.clone()  # the first layer's input is the model's own too
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


def offloaded(limit_bytes: int = 64 * MIB) -> tuple[nn.ModuleList, ActivationOffloading]:
    layers, offloading = blocks(), ActivationOffloading(limit_bytes, CPU)
    offloading.attach(list(layers))
    return layers, offloading


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) == 4 * NUM_LAYERS
    assert all(map(torch.equal, found, wanted))


def held_bytes(layers: nn.ModuleList) -> int:
    """Of the device's memory, what a forward pass leaves taken."""
    values = batch()
    loss_of(layers, *values).backward()  # takes the host's memory
    what = {"activities": [ProfilerActivity.CPU], "profile_memory": True, "acc_events": True}
    with profile(**what) as seen, record_function("forward"):
        loss = loss_of(layers, *values)
    (found,) = (event for event in seen.key_averages() if event.key == "forward")
    loss.backward()
    return found.cpu_memory_usage


@pytest.mark.parametrize(("limit_bytes", "num_moved"), [(64 * MIB, NUM_LAYERS - 1), (3 * INPUT_BYTES, 3)])
def test_inputs_of_layers_hold_nothing_between_their_passes_as_far_as_they_fit(
    limit_bytes: int, num_moved: int, caplog: pytest.LogCaptureFixture
) -> None:
    layers, offloading = offloaded(limit_bytes)
    with caplog.at_level(logging.WARNING, "nemo_offload_rl"):
        assert held_bytes(blocks()) - held_bytes(layers) == num_moved * INPUT_BYTES
    assert offloading.host_bytes == limit_bytes
    told = "Inputs of layers need more than 0.00 GiB of host memory; what does not fit stays"
    assert caplog.text.count(told) == (num_moved < NUM_LAYERS - 1)
    assert_same(grads_of(layers), expected(1, 1))


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


def test_host_memory_is_used_again_also_that_of_a_pass_that_raised() -> None:
    layers, offloading = offloaded((NUM_LAYERS - 1) * INPUT_BYTES)
    loss_of(layers, *batch()).backward()
    layers[3].raises = True
    for _ in range(3):
        with pytest.raises(ArithmeticError, match="in a layer"):
            loss_of(layers, *batch())
    layers[3].raises = False
    layers.zero_grad()
    for seed in (1, 2):
        loss_of(layers, *batch(seed)).backward()
    assert_same(grads_of(layers), expected(1, 2))
    offloading._take_back()
    assert offloading._arena.used_bytes == 0
    offloading.close()
    assert offloading.host_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_gradients_have_the_same_bits_and_the_memory_is_free_between_the_passes() -> None:
    width, rows, device = 2048, 4096, torch.device("cuda")
    input_bytes = rows * width * 4
    plain, moving = blocks(width).to(device), blocks(width).to(device)
    offloading = ActivationOffloading(2 << 30, device)
    offloading.attach(list(moving))

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
    assert held - held_less == (NUM_LAYERS - 1) * input_bytes  # the same as on a CPU
    assert peak - peak_less > (NUM_LAYERS - 4) * input_bytes
    assert offloading.host_bytes == 2 << 30
    offloading.close()


CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"sequence_packing": PACKING},
    "parameters in parts": {"cpu_offload": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["qwen3-tied", "gemma2-tied", "phi3", "qwen3_moe"])
def test_training_has_the_same_bits(tmp_path: Path, name: str, case: str) -> None:
    row = Row(name, DTENSOR, tmp_path / "model")
    save_family_folder(row.folder, name)

    def run(**changes: Any) -> tuple[list[TrainResult], dict[str, Tensor]]:
        with row.worker(activation_checkpointing=True, **CASES[case], **changes) as worker:
            return steps(worker, BATCHES), weights_of(worker)

    wanted, found = run(), run(activation_offload=True)
    assert found[0] == wanted[0]
    assert_equal(found[1], wanted[1])
