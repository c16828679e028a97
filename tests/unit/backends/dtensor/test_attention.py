"""Which attention a model gets, and that it is the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_close
from model_families import FAMILIES, family_config, save_family_folder, trained_by
from policy_cases import NLL, full_grads, hf_logprobs, hf_loss_and_grads, make_batch, one_rank_worker, save_family
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, masking_utils

from nemo_offload_rl.backends.dtensor import loading
from nemo_offload_rl.backends.dtensor.attention import (
    CAPPED,
    CAUSAL,
    MASKED,
    PACKED,
    _packed_attention,
    choose_attention,
)
from nemo_offload_rl.keys.policy import BatchingConfig
from nemo_offload_rl.models.families import DTENSOR, tells_attention_bounds

PACKING = BatchingConfig(enabled=True, train_mb_tokens=40, logprob_mb_tokens=60, sequence_length_round=1)
WINDOWS = {
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "mistral": {"sliding_window": 4},
}


@pytest.mark.parametrize("changes", [{}, {"sequence_packing": PACKING}], ids=["padded", "packed"])
@pytest.mark.parametrize("family", list(WINDOWS))
def test_layers_with_a_sliding_window_keep_it(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    batch = make_batch()
    everywhere = save_family(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **WINDOWS[family])
    expected = hf_logprobs(model, batch).detach()
    assert (hf_logprobs(everywhere, batch) - expected).abs().max() > 0.1
    with one_rank_worker(tmp_path, hf_config_overrides=WINDOWS[family], **changes) as worker:
        worker.prepare_for_lp_inference()
        assert_close(worker.get_logprobs(batch), expected)


@pytest.mark.parametrize("changes", [{}, {"sequence_packing": PACKING}], ids=["padded", "packed"])
def test_sinks_take_their_share_of_the_softmax(tmp_path: Path, changes: dict[str, Any]) -> None:
    batch, model = make_batch(), save_family_folder(tmp_path, "gpt_oss")
    before = hf_logprobs(model, batch).detach()
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.sinks.data = torch.linspace(-2, 3, 4) + index
    model.save_pretrained(tmp_path)
    expected = hf_logprobs(model, batch).detach()
    assert (before - expected).abs().max() > 0.1
    _, grads = hf_loss_and_grads(model, batch)
    with one_rank_worker(tmp_path, **changes) as worker:
        worker.prepare_for_lp_inference()
        assert_close(worker.get_logprobs(batch), expected)
        worker.prepare_for_training()
        worker.forward_backward(batch, NLL())
        assert_close(full_grads(worker), grads)


def test_padded_rows_are_attended_without_a_look_at_their_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(_: torch.Tensor) -> None:
        raise AssertionError("the host would wait for the device here")

    save_family(tmp_path, "qwen3")
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", look)
    with one_rank_worker(tmp_path) as worker:
        worker.prepare_for_training()
        assert worker.train(make_batch(), NLL()).grad_norm[0] > 0
    with one_rank_worker(tmp_path, sequence_packing=PACKING) as worker:
        worker.prepare_for_training()
        with pytest.raises(AssertionError, match="wait"):  # this is what looks
            worker.train(make_batch(), NLL())


def test_packed_rows_have_a_kernel_of_their_own_on_a_gpu_in_half_precision(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3")
    config = AutoConfig.from_pretrained(tmp_path)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_attention(config, cuda, torch.bfloat16, longest=32, packs=True) == PACKED
    assert choose_attention(config, cuda, torch.float32, longest=32, packs=True) == MASKED
    assert choose_attention(config, cpu, torch.bfloat16, longest=32, packs=True) == MASKED
    assert choose_attention(config, cuda, torch.bfloat16, longest=32, packs=False) == CAUSAL
    windowed = AutoConfig.from_pretrained(tmp_path, **WINDOWS["qwen3"])
    assert {choose_attention(windowed, cuda, torch.bfloat16, longest=32, packs=packs) for packs in (True, False)} == {
        MASKED
    }
    # A window that no row exceeds is none.
    assert choose_attention(windowed, cuda, torch.bfloat16, longest=4, packs=True) == PACKED
    assert choose_attention(windowed, cuda, torch.bfloat16, longest=4, packs=False) == CAUSAL


@pytest.mark.parametrize("name", [name for name in FAMILIES if DTENSOR in trained_by(name)])
def test_the_kernel_for_packed_rows_is_for_models_that_tell_it_where_rows_begin(name: str) -> None:
    """A GPU's kernel, in the place of which something looks at what the model hands over."""
    config = family_config(name)
    if choose_attention(config, torch.device("cuda"), torch.bfloat16, longest=32, packs=True) == CAPPED:
        return
    told = []

    def look(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        told.append("cu_seq_lens_q" in kwargs)
        return query.new_zeros(*query.shape[:1], query.shape[2], query.shape[1], args[1].shape[-1]), None

    AttentionInterface.register("looks", look)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="looks")
    if config.model_type == "falcon_h1":
        loading._hand_on_arguments(model)  # transformers' model hands its layers none
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    where = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 5, "max_length_k": 5}
    model.base_model(input_ids=torch.arange(8)[None], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), **where)
    assert set(told) == {tells_attention_bounds(config.to_dict())}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("value_dim", [32, 64])
def test_values_of_packed_rows_may_be_narrower_than_keys(value_dim: int) -> None:
    lengths = [5, 1, 12]
    query, key = (torch.randn(1, 4, sum(lengths), 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    value = torch.randn(1, 4, sum(lengths), value_dim, device="cuda", dtype=torch.bfloat16)
    bounds = torch.tensor([0, 5, 6, 18], dtype=torch.int32, device="cuda")
    found, _ = _packed_attention(
        torch.nn.Module(), query, key, value, None, scaling=0.2, cu_seq_lens_q=bounds, max_length_q=max(lengths)
    )
    parts = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    expected = [F.scaled_dot_product_attention(*part, is_causal=True, scale=0.2) for part in parts]
    torch.testing.assert_close(found, torch.cat(expected, dim=2).transpose(1, 2), atol=2e-2, rtol=2e-2)
