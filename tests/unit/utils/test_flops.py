from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from policy_cases import save_moe
from safetensors.torch import save_file
from tiny_models import qwen3_config, save_model_folder
from torch.utils.flop_counter import FlopCounterMode

from nemo_offload_rl.utils.flops import peak_flops, read_model_sizes


def test_parameters_are_counted_from_the_files_headers(tmp_path):
    model = save_model_folder(tmp_path, 0)
    sizes = read_model_sizes(str(tmp_path))
    assert sizes is not None
    assert sizes.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert read_model_sizes("owner/name") is None


def test_of_files_only_what_the_model_has_is_counted(tmp_path):
    model = save_model_folder(tmp_path, 0, qwen3_config(tied=True))
    expected = read_model_sizes(str(tmp_path))
    assert expected is not None and expected.ties_embeddings
    num_layers, weight = expected.num_layers, model.lm_head.weight.detach()
    more = ("lm_head.weight", f"model.layers.{num_layers}.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight")
    save_file({name: weight.clone() for name in more}, tmp_path / "more.safetensors")
    assert read_model_sizes(str(tmp_path)) == expected
    save_file({f"model.layers.{num_layers - 1}.bias": torch.ones(3)}, tmp_path / "more.safetensors")
    assert read_model_sizes(str(tmp_path)) == replace(
        expected, num_parameters=expected.num_parameters + 3, num_active=expected.num_active + 3
    )


def test_the_estimate_is_what_torch_counts_but_for_the_embedding_the_norms_and_attention(tmp_path):
    model = save_model_folder(tmp_path, 0)
    sizes = read_model_sizes(str(tmp_path))
    assert sizes is not None
    length = 64
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
    counted = counter.get_total_flops()
    products = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    looked_up = 2 * (sizes.num_parameters - products) * length
    attention = 2 * sizes.num_layers * sizes.attention_width * length**2
    estimate = sizes.forward_flops([length])
    assert estimate - looked_up - attention == 2 * products * length
    # The counter leaves attention out on CPU, and counts the products that make rotary angles.
    assert counted == pytest.approx(2 * products * length, rel=1e-3)


def test_of_a_mixtures_experts_those_count_that_a_token_goes_through(tmp_path):
    model = save_moe(tmp_path)  # two of four experts take each token
    sizes = read_model_sizes(str(tmp_path))
    assert sizes is not None
    in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert in_experts > 0
    assert sizes.num_parameters == sum(p.numel() for p in model.parameters())
    assert sizes.num_in_experts == in_experts
    assert sizes.num_active == sizes.num_parameters - in_experts // 2
    (tmp_path / "more.safetensors").write_bytes(b"cut")
    assert read_model_sizes(str(tmp_path)) is None
    dense = replace(sizes, num_active=sizes.num_parameters)
    assert dense.forward_flops([64]) - sizes.forward_flops([64]) == in_experts * 64


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Acme 1", None)]
)
def test_peaks_are_found_by_name(name, peak):
    assert peak_flops(name) == peak
