from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from policy_cases import NLL, assert_equal, full_params, make_batch, make_settings, save_family, worker_of
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from megatron_cpu_shim import megatron_on_cpu
from tiny_gpt import process_group

from nemo_offload_rl.backends.megatron.upstream import grouped_products
from nemo_offload_rl.backends.megatron.upstream.grouped_products import grouped_forward, is_plain
from nemo_offload_rl.protocols.backend import ProcessInfo

ON_TRANSFORMER_ENGINE = {
    "precision": "bfloat16",
    "bf16": True,
    "pipeline_dtype": "bfloat16",
    "transformer_impl": "transformer_engine",
    "use_precision_aware_optimizer": True,
    "train_micro_batch_size": 1,
}


def layer_of(num_experts, num_in, num_out, dtype=torch.bfloat16, use_bias=False):
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"weight{expert}": nn.Parameter(torch.randn(num_out, num_in, generator=generator).to(dtype))
        for expert in range(num_experts)
    }
    return SimpleNamespace(num_gemms=num_experts, use_bias=use_bias, **weights)


@pytest.mark.parametrize("num_rows", [[3, 0, 5, 1], [0, 0, 0, 2], [7, 1, 1, 0], [0, 0, 0, 0]])
def test_each_expert_s_rows_meet_its_own_matrix_and_an_expert_without_rows_has_gradient_0(num_rows):
    layer = layer_of(4, 16, 24)
    rows = torch.randn(sum(num_rows), 16, dtype=torch.bfloat16, requires_grad=True)
    made, bias = grouped_forward(layer, rows, num_rows)
    assert bias is None
    grad = torch.randn_like(made)
    made.backward(grad)
    weights = [getattr(layer, f"weight{expert}") for expert in range(4)]
    per_expert = zip(rows.detach().split(num_rows), grad.split(num_rows), weights, strict=True)
    expected = [(r @ w.detach().t(), g @ w.detach(), g.t() @ r) for r, g, w in per_expert]
    torch.testing.assert_close(made, torch.cat([each[0] for each in expected]))
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, torch.cat([each[1] for each in expected]))
    for weight, (_, _, grad_weight) in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, grad_weight)


def test_frozen_matrices_get_no_gradient_and_rows_do():
    layer = layer_of(2, 16, 8)
    for expert in range(2):
        getattr(layer, f"weight{expert}").requires_grad_(False)
    rows = torch.randn(4, 16, dtype=torch.bfloat16, requires_grad=True)
    grouped_forward(layer, rows, [1, 3])[0].sum().backward()
    assert rows.grad is not None and layer.weight0.grad is None


class Experts(nn.Module):
    """Five experts, the fourth of which is frozen."""

    def __init__(self):
        super().__init__()
        self.num_gemms = 5
        for name, weight in vars(layer_of(5, 16, 24)).items():
            if isinstance(weight, nn.Parameter):
                self.register_parameter(name, weight)
        self.weight3.requires_grad_(False)


def wrapped(*, in_fp32, overlap):
    """In Megatron's data parallelism of one rank; every parameter has a bucket of its own if they overlap."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1, calculate_per_token_loss=True)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=in_fp32, overlap_grad_reduce=overlap, bucket_size=1, use_distributed_optimizer=True
    )
    return DistributedDataParallel(config, ddp_config, Experts())


def rows_of(num_rows, seed, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(num_rows), 16, generator=generator).bfloat16().requires_grad_(**options)


def train(ddp, *, into_buffers):
    """Gradients of matrices and rows in two steps of two micro-batches, and how many of the matrices' nodes ran."""
    found, ran = [], []
    for node in ddp.grad_accs:
        node.register_hook(lambda *_: ran.append(1))
    for step in range(2):
        ddp.zero_grad_buffer()
        # The fifth expert never has rows, the first one in half of the micro-batches.
        for last, num_rows in enumerate(([3, 1, 5, 2, 0], [0, 2, 4, 3, 0])):
            rows = rows_of(num_rows, seed=2 * step + last)
            with nullcontext() if last else ddp.no_sync():
                made, _ = grouped_forward(ddp.module, rows, num_rows, ddp if into_buffers else None)
                made.float().square().sum().backward()
            found.append(rows.grad)
        if step and ddp.ddp_config.overlap_grad_reduce:  # the first step only counts
            assert all(group.grad_reduce_handle is not None for group in ddp.bucket_groups)
        ddp.finish_grad_sync()
        found += [weight.main_grad.clone() for weight in ddp.module.parameters() if weight.requires_grad]
    assert all(weight.grad is None for weight in ddp.module.parameters())
    return found, len(ran)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_gradients_added_to_megatron_s_buffers_are_those_of_its_hooks_bit_by_bit(in_fp32, overlap):
    with megatron_on_cpu(), process_group():
        expected, num_hooks = train(wrapped(in_fp32=in_fp32, overlap=overlap), into_buffers=False)
        assert num_hooks == 4 * 4  # micro-batches, trained matrices
        ddp = wrapped(in_fp32=in_fp32, overlap=overlap)
        found, num_hooks = train(ddp, into_buffers=True)
        assert num_hooks == 0
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        weights = list(ddp.module.parameters())
        assert {weight.main_grad.dtype for weight in weights[:3]} == {torch.float32 if in_fp32 else torch.bfloat16}
        assert all(weight.main_grad.any() for weight in weights[:3])
        assert not weights[4].main_grad.any()
        assert not hasattr(weights[3], "main_grad")


def test_matrices_below_which_nothing_is_trained_get_their_gradients_by_megatron_s_hooks():
    num_rows = [3, 1, 5, 2, 0]
    with megatron_on_cpu(), process_group():
        ddp = wrapped(in_fp32=True, overlap=False)
        sums = []
        for trains_below in (True, False):
            ddp.zero_grad_buffer()
            rows = rows_of(num_rows, seed=0, requires_grad=trains_below)
            grouped_forward(ddp.module, rows, num_rows, ddp)[0].sum().backward()
            sums.append(torch.cat([buffer.grad_data.clone() for buffer in ddp.buffers]))
        assert sums[0].any() and torch.equal(*sums)


def test_only_matrices_of_bfloat16_without_biases_and_in_steps_of_16_bytes_are_taken():
    assert is_plain(layer_of(2, 16, 8))
    assert not is_plain(layer_of(2, 16, 8, dtype=torch.float16))
    assert not is_plain(layer_of(2, 16, 8, use_bias=True))
    assert not is_plain(layer_of(2, 12, 8)) and not is_plain(layer_of(2, 16, 12))
    assert not is_plain(SimpleNamespace(num_gemms=2, use_bias=False))  # one stacked parameter


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [[300, 0, 77, 1], [0, 0, 0, 0], [4096, 4096, 4096, 4096]])
def test_on_a_gpu_they_are_those_of_transformer_engine(num_rows):
    from transformer_engine.pytorch import GroupedLinear  # pyright: ignore[reportMissingImports]

    layer = GroupedLinear(4, 256, 512, bias=False, params_dtype=torch.bfloat16, device="cuda")
    assert is_plain(layer)
    inputs = torch.randn(sum(num_rows), 256, device="cuda", dtype=torch.bfloat16)
    found = []
    for product in (layer, lambda rows, counts: grouped_forward(layer, rows, counts)[0]):
        layer.zero_grad()
        rows = inputs.clone().requires_grad_()
        made = product(rows, num_rows)
        made.square().sum().backward()
        found.append([made.detach(), rows.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    for theirs, ours in zip(*found, strict=True):
        assert (theirs - ours).float().norm() <= 5e-3 * theirs.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"grad_reduce_in_fp32": False},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {"activation_checkpointing": True},
    ],
)
def test_a_worker_trains_as_with_megatron_s_hooks_bit_by_bit(tmp_path, monkeypatch, changes):
    pytest.importorskip("transformer_engine")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    save_family(tmp_path, "qwen3-moe")
    settings = make_settings(tmp_path, backend="megatron", **ON_TRANSFORMER_ENGINE, **changes)
    wrappers = []

    def by_hooks(layer, rows, num_rows, ddp=None):
        wrappers.append(ddp)
        return grouped_forward(layer, rows, num_rows)

    def trained():
        with worker_of(settings, ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0")) as worker:
            results = []
            for seed in range(3):
                worker.prepare_for_training()
                results.append(worker.train(make_batch(seed=seed), NLL()))
                worker.offload_after_refit()
            return results, {name: tensor.cpu() for name, tensor in full_params(worker).items()}

    results, params = trained()
    monkeypatch.setattr(grouped_products, "grouped_forward", by_hooks)
    results_by_hooks, params_by_hooks = trained()
    assert wrappers and None not in wrappers  # the first run had them
    assert results == results_by_hooks
    assert_equal(params, params_by_hooks)
