from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nemo_offload_rl.policy.backends.megatron.grouped_products import grouped_forward, is_plain


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
