"""Compiled layers: how often they are compiled as sizes change. The compiler's front end is real, its kernels not."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
from policy_cases import (
    NO_LORA,
    ONE_RANK,
    assert_equal,
    full_grads,
    make_batch,
    make_settings,
    run_ranks,
    save_family,
    shard,
    worker_of,
)
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.backends.dtensor.built import BuiltModel
from nemo_offload_rl.backends.dtensor.early_compile import run_passes
from nemo_offload_rl.backends.dtensor.model import compile_layers
from nemo_offload_rl.backends.ranks import join_process_group
from nemo_offload_rl.keys.policy import BatchingConfig
from nemo_offload_rl.residency import local_tensor


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


@torch._dynamo.config.patch(recompile_limit=2)
def test_more_kinds_of_passes_than_torch_allows_by_itself_are_all_compiled():
    layers, num_kinds = nn.ModuleList([Layer(), Layer()]), 4
    compile_layers(layers)
    for number in range(num_kinds):
        for layer in layers:
            layer(torch.randn(2, 3, 8), longest=1, kind="k" * number)
    assert counters["stats"]["unique_graphs"] == num_kinds


BY_TOKENS = BatchingConfig(enabled=True, train_mb_tokens=64, logprob_mb_tokens=64, sequence_length_round=1)
PACKED = {"sequence_packing": BY_TOKENS, "precision": "bfloat16"}
RECOMPUTED = {"activation_checkpointing": True}
ADAPTED = {"lora_cfg": replace(NO_LORA, enabled=True, dropout=0.1)}
CASES = {
    "single rows, inputs on the host": (
        "qwen3",
        {**RECOMPUTED, "activation_offload": True, "train_micro_batch_size": 1, "logprob_batch_size": 1},
        1,
    ),
    "packed, adapters with dropout": ("qwen3", {**ADAPTED, **PACKED}, 2),
    "layer by layer": ("qwen3-tied", {**RECOMPUTED, "cpu_offload": True, "precision": "bfloat16"}, 1),
    "two kinds of layers": ("smollm3-tied", {}, 2),
}


@pytest.mark.trains
@pytest.mark.parametrize("case", CASES)
def test_a_samples_passes_compile_all_that_the_models_passes_need_and_change_no_bit(tmp_path, monkeypatch, case):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    family, changes, num_layers = CASES[case]
    save_family(tmp_path, family)
    settings = make_settings(tmp_path, **changes)
    expected = results_of(settings, ONE_RANK, compiles=False)
    assert compile_sample(settings, ONE_RANK) == num_layers
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs >= 2
    assert_equal(results_of(settings, ONE_RANK), expected)
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.processes
def test_ranks_that_share_parameters_need_no_other_code_than_one_rank_alone(tmp_path):
    save_family(tmp_path / "model", "qwen3")
    run_ranks(2, tmp_path, compile_before_ranks_meet, str(tmp_path / "model"), str(tmp_path / "later"))


def compile_before_ranks_meet(process, model, rendezvous):
    torch.compile = partial(torch.compile, backend="eager")
    torch.distributed.destroy_process_group()
    settings = make_settings(model, **RECOMPUTED)
    compile_sample(settings, process)
    num_graphs = counters["stats"]["unique_graphs"]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=process.rank, world_size=process.world_size
    )
    results_of(settings, process)
    assert counters["stats"]["unique_graphs"] == num_graphs == 2


def compile_sample(settings, process):
    """Do what `compile_early` does on a GPU; return the number of the sample's layers."""
    with ExitStack() as made:
        alone = replace(process, rank=0, world_size=1)
        join_process_group(alone, made)
        sample = BuiltModel(settings, alone, is_sample=True)
        compile_layers(sample.layers)
        assert run_passes(sample, settings, most_bytes=1 << 28) is None
        assert all(local_tensor(it).untyped_storage().nbytes() == 0 for it in sample.module.parameters())
        module, num_layers = weakref.ref(sample.module), len(sample.layers)
        del sample
        gc.collect()
        assert module() is None
        return num_layers


def results_of(settings, process, *, compiles=True):
    """Logprobs of batches of two widths, and gradients, in a worker."""
    found = {}
    with worker_of(settings, process, keep_reference=True) as worker:
        if compiles:
            compile_layers(worker._backend._built.layers)
        for width in (14, 10):
            batch = make_batch(width=width)
            worker.prepare_for_lp_inference()
            found[f"logprobs {width}"] = worker.get_logprobs(batch)
            found[f"reference {width}"] = worker.get_reference_logprobs(batch)
            worker.prepare_for_training()
            worker.forward_backward(shard(batch, worker), NLLLoss())
            if not settings.dtensor_cfg.cpu_offload:
                found |= {f"{name} {width}": grad for name, grad in full_grads(worker).items()}
            worker.optim_step()
        found["drawn next"] = torch.rand(4)
    return found
