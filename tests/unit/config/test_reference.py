from __future__ import annotations

from nemo_offload_rl.config.keys import known_keys
from nemo_offload_rl.config.reference import TARGET, main, render
from nemo_offload_rl.keys.master import DistillationMasterConfig, DpoMasterConfig, GrpoMasterConfig, SftMasterConfig


def test_the_committed_reference_is_up_to_date() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), "run python -m nemo_offload_rl.config.reference"
    assert main(["--check"]) == 0


def test_the_reference_names_every_key_once() -> None:
    text = render()
    for schema in (GrpoMasterConfig, DistillationMasterConfig, SftMasterConfig, DpoMasterConfig):
        for key in known_keys(schema):
            if not key.startswith("data.validation.") and ".datasets[]" not in key:
                assert f"`{key}`" in text, key


def test_defaults_are_shown_as_a_file_would_write_them() -> None:
    text = render()
    assert "| `policy.train_global_batch_size` | integer >= 1 | *required* |" in text
    assert "| `policy.generation.vllm_cfg.expose_http_server` | true or false | `false` |" in text
    assert "| `policy.logprob_batch_size` | integer >= 1 | `${policy.train_micro_batch_size}` |" in text
    assert "| `policy.logprob_chunk_size` | integer >= 1 or null | `null` |" in text
