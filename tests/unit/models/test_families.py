"""Records of model families against the tests' list, and against what `transformers` declares."""

from __future__ import annotations

import pytest
from model_families import FAMILIES as TINY
from model_families import family_config, trained_by

from nemo_offload_rl.models.families import DTENSOR, FAMILIES, has_sliding_window, logits_divisor
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.policy.backends.dtensor.split_plan import declared_plan, split_problem


def test_every_record_has_a_tiny_model_and_its_backends_train_it() -> None:
    by_type: dict[str, set[str]] = {}
    for name in TINY:
        by_type.setdefault(family_config(name).model_type, set()).update(trained_by(name))
    assert by_type == {name: set(family.trained_by) for name, family in FAMILIES.items()}


@pytest.mark.parametrize("name", [name for name in TINY if DTENSOR in trained_by(name)])
def test_the_dtensor_backend_knows_the_plan_of_every_family_that_it_trains(name: str) -> None:
    config = family_config(name).to_dict()
    assert split_problem(config, declared_plan(config["model_type"]), 2) is None
    assert "num_attention_heads=4" in str(split_problem(config, declared_plan(config["model_type"]), 3))


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("mixtral", "splits layers.*.mlp.experts.gate_up_proj of mixtral as packed_colwise"),
        ("deepseek_v3", "of deepseek_v3 as packed_colwise, which the DTensor backend does not know; set it to 1"),
        ("gpt2", "declares no tensor-parallel plan for gpt2"),
    ],
)
def test_a_plan_with_an_unknown_style_or_none_is_refused_by_name(model_type: str, words: str) -> None:
    config = {"model_type": model_type}
    assert words in str(split_problem(config, declared_plan(model_type), 2))
    assert split_problem(config, declared_plan(model_type), 1) is None


def test_windows_and_divisors_are_read_as_each_family_names_them() -> None:
    assert {name for name in TINY if has_sliding_window(family_config(name).to_dict())} == {"mistral-window"}
    qwen = {"model_type": "qwen2", "sliding_window": 4, "num_hidden_layers": 4, "max_window_layers": 2}
    assert has_sliding_window(qwen | {"use_sliding_window": True})
    assert not has_sliding_window(qwen | {"use_sliding_window": False})
    assert not has_sliding_window(qwen | {"use_sliding_window": True, "layer_types": ["full_attention"] * 4})
    assert logits_divisor({"model_type": "granite", "logits_scaling": 8.0}) == 8.0
    assert logits_divisor({"model_type": "llama", "logits_scaling": 8.0}) == 1.0


def test_sizes_are_those_of_the_config_under_every_familys_names() -> None:
    shape = ModelShape.of(family_config("qwen3_moe").to_dict())
    assert (shape.num_experts, shape.num_active_experts, shape.num_shared_experts) == (4, 2, 0)
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (64, 4, 2, 32)
    old = ModelShape.of({"hidden_size": 64, "num_attention_heads": 4})
    assert (old.num_kv_heads, old.head_dim, old.num_experts, old.vocab_size) == (4, 16, 0, None)
    deepseek = ModelShape.of({"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1})
    assert (deepseek.num_experts, deepseek.num_active_experts, deepseek.num_shared_experts) == (8, 3, 1)
