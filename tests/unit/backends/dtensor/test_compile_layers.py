"""Compiled layers: how often they are compiled as sizes change. The compiler's front end is real, its kernels not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from policy_cases import make_batch, one_rank_worker, save_family
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.backends.dtensor.model import compile_layers


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.epsilon, self.scale = 1e-6, 0.25

    def forward(self, hidden: torch.Tensor, *, longest: int, kind: str = "") -> torch.Tensor:
        hidden = torch.tanh(self.inner(hidden)) / (longest + len(kind)) + self.epsilon
        return scaled_dot_product_attention(hidden, hidden, hidden, scale=self.scale)


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_layers_of_varying_sizes_are_compiled_once_and_compute_the_same(num_rows):
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer(), Layer(), Layer()])
    inputs = [(torch.randn(num_rows, size, 8), size + 3) for size in (5, 6, 11, 4)]
    plain = [[layer(hidden, longest=longest) for layer in layers] for hidden, longest in inputs]
    compile_layers(layers)
    for (hidden, longest), expected in zip(inputs, plain, strict=True):
        for layer, output in zip(layers, expected, strict=True):
            assert torch.equal(layer(hidden, longest=longest), output)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["aot_autograd"]["total"] == 1  # 2 if a constant makes the compiler start again


@torch._dynamo.config.patch(recompile_limit=8)
def test_more_kinds_of_passes_than_torch_allows_by_itself_are_all_compiled():
    layers, num_kinds = nn.ModuleList([Layer(), Layer()]), 12
    compile_layers(layers)
    for number in range(num_kinds):
        for layer in layers:
            layer(torch.randn(2, 3, 8), longest=1, kind="k" * number)
    assert counters["stats"]["unique_graphs"] == num_kinds


def test_all_layers_share_one_graph_for_logprobs_and_one_for_training_with_recomputation(tmp_path):
    save_family(tmp_path, "qwen3")
    sizes = {"train_micro_batch_size": 2, "logprob_batch_size": 2}
    with one_rank_worker(tmp_path, activation_checkpointing=True, **sizes) as worker:
        compile_layers(worker._backend._built.layers)
        for width in (14, 10):
            worker.prepare_for_lp_inference()
            worker.get_logprobs(make_batch(width=width))
            worker.prepare_for_training()
            worker.forward_backward(make_batch(width=width), NLLLoss())
            worker.zero_grad()
    assert counters["stats"]["unique_graphs"] == 2
