from __future__ import annotations

from configuration_pages import FOLDER, render

from nemo_offload_rl.config.keys import known_keys
from nemo_offload_rl.keys.master import DistillationMasterConfig, DpoMasterConfig, GrpoMasterConfig, SftMasterConfig


def test_the_committed_reference_is_up_to_date() -> None:
    pages = render()
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run python -m tests.support.configuration_pages"
    assert set(FOLDER.glob("*.md")) <= pages.keys()


def test_the_reference_names_every_key_of_grpo_on_one_page_and_the_others_on_any() -> None:
    pages = render()
    for key in _documented(GrpoMasterConfig):
        naming = [path.name for path, text in pages.items() if f"\n| `{key}` |" in text or f"# `{key}`\n" in text]
        own = {"distillation.md", "sft.md", "dpo.md", "evaluation.md"}
        assert len(set(naming) - own) == 1, key
    text = "\n".join(pages.values())
    for schema in (DistillationMasterConfig, SftMasterConfig, DpoMasterConfig):
        for key in _documented(schema):
            assert f"`{key}`" in text, key


def test_defaults_are_shown_as_a_file_would_write_them() -> None:
    policy, generation = (render()[FOLDER / name] for name in ("policy.md", "generation.md"))
    assert "| `policy.train_global_batch_size` | integer >= 1 | *required* |" in policy
    assert "| `policy.generation.vllm_cfg.expose_http_server` | true or false | `false` |" in generation
    assert "| `policy.logprob_batch_size` | integer >= 1 | `${policy.train_micro_batch_size}` |" in policy
    assert "| `policy.logprob_chunk_size` | integer >= 1 or null | `null` |" in policy


def _documented(schema: type) -> list[str]:
    keys = known_keys(schema)
    return [key for key in keys if not key.startswith("data.validation.") and ".datasets[]" not in key]
