"""The command line, the YAML that it writes, and the count of a folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from nemo_rl_files import dpo_file, grpo_file, sft_file
from rich.console import Console
from supervised_cases import read_metrics, write_model, write_rows

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.migrate.__main__ import main
from nemo_offload_rl.migrate.count import count_folder
from nemo_offload_rl.migrate.draft import CONVERSIONS
from nemo_offload_rl.migrate.mapping import migrate
from nemo_offload_rl.migrate.report import render_yaml
from nemo_offload_rl.migrate.rules import RENAMED, Renamed
from nemo_offload_rl.runs.loading import load_dpo_config, load_grpo_config, load_sft_config
from nemo_offload_rl.runs.supervised import local_policy, run_dpo, run_sft
from nemo_offload_rl.utils.config import load_config

GUIDE = Path(__file__).parents[3] / "docs/guides/from-nemo-rl.md"


def write(path: Path, config: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("make", [grpo_file, sft_file, dpo_file])
def test_the_yaml_that_is_written_reads_back_as_the_configuration_with_its_notes(make, tmp_path):
    migration = migrate(make())
    text = render_yaml(migration.config, migration.report, "their.yaml")
    (tmp_path / "our.yaml").write_text(text)
    assert load_config(tmp_path / "our.yaml") == migration.config
    # With another model comes its own tokenizer.
    other = load_config(tmp_path / "our.yaml", ["policy.model_name=other"])
    assert other["policy"]["tokenizer"]["name"] == "other"
    assert text.startswith("# From NeMo-RL's their.yaml,")
    assert "  # policy.offload_optimizer_for_logprob in NeMo-RL\n" in text
    assert "policy.sequence_packing.algorithm" in text.partition("\n\n")[0]


def test_the_command_prints_one_table_and_writes_a_file_once(tmp_path, capsys):
    theirs, ours = write(tmp_path / "their.yaml", grpo_file()), tmp_path / "our.yaml"
    assert main([str(theirs), "-o", str(ours)]) == 0
    table = capsys.readouterr().out
    for heading in ("taken over as they are: ", "taken over with another value: ", "not in the file: "):
        assert heading in table
    assert "not available here" not in table
    assert load_config(ours) == migrate(grpo_file(), theirs).config
    with pytest.raises(ConfigError, match=r"our\.yaml exists; give the name of a new file"):
        main([str(theirs), "-o", str(ours)])
    with pytest.raises(ConfigError, match=r"nowhere/our\.yaml cannot be written: No such file or directory"):
        main([str(theirs), "-o", str(tmp_path / "nowhere" / "our.yaml")])


def test_a_file_that_uses_what_is_not_here_is_not_written_and_told_in_one_line(tmp_path, capsys):
    config = grpo_file()
    config["grpo"]["val_start_at"] = 5
    config["policy"]["draft"] = {"enabled": True}
    with pytest.raises(ConfigError) as caught:
        main([str(write(tmp_path / "their.yaml", config)), "-o", str(tmp_path / "our.yaml")])
    assert str(caught.value) == (
        "this NeMo-RL configuration uses 2 features that are not available here: validation that begins late "
        "(grpo.val_start_at); draft models (policy.draft.enabled); turn them off, or leave them out"
    )
    assert "not available here: 2" in capsys.readouterr().out
    config = grpo_file()
    config["loss_fn"]["magic"] = 1
    with pytest.raises(ConfigError) as caught:
        main([str(write(tmp_path / "their.yaml", config))])
    assert str(caught.value) == (
        "this NeMo-RL configuration uses 1 feature that is not available here: the key loss_fn.magic; turn it off, or "
        "leave it out"
    )
    assert capsys.readouterr().out.rstrip().endswith("not available here: 1\n  loss_fn.magic")
    assert not (tmp_path / "our.yaml").exists()


@pytest.mark.parametrize("arguments", [[], ["a.yaml", "--count", "b"]])
def test_the_command_wants_a_file_or_a_folder(arguments):
    with pytest.raises(ConfigError, match="give one file, or --count and a folder"):
        main(arguments)


def test_a_folder_is_counted_with_what_stops_its_files_the_most_frequent_first(tmp_path, capsys):
    drafting, gdpo = grpo_file(), grpo_file()
    for config in (drafting, gdpo):
        config["policy"]["draft"] = {"enabled": True}
    gdpo["grpo"]["adv_estimator"]["name"] = "gdpo"
    too_long = grpo_file()
    too_long["policy"]["train_global_batch_size"] = 3
    files = {
        "grpo.yaml": grpo_file(),
        "more/sft.yaml": sft_file(),
        "more/dpo.yaml": dpo_file(),
        "drafting.yaml": drafting,
        "gdpo.yaml": gdpo,
        "batch.yaml": too_long,
        "ppo.yaml": {**grpo_file(), "ppo": {}},
        "own.yaml": {"grpo": {"seed": 1}},
    }
    for name, config in files.items():
        write(tmp_path / name, config)
    (tmp_path / "orphan.yaml").write_text("defaults: nowhere.yaml\n")
    count = count_folder(tmp_path)
    assert count.loaded == ["grpo.yaml", "more/dpo.yaml", "more/sft.yaml"]
    assert count.others == ["own.yaml", "ppo.yaml"]
    assert count.unreadable.keys() == {"orphan.yaml"}
    assert main(["--count", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "3 of 6 files load: dpo 1 of 1, grpo 1 of 4, sft 1 of 1",
        "3 of them name a model of a family that is trained here",
        "not counted: 2 for something else, 1 not readable",
    ]
    assert lines[5:8] == [
        "    2      1  draft models",
        "    1      1  our check: policy.train_global_batch_size N does not divide the N responses of a step "
        "(grpo.num_prompts_per_step N x num_generations_per_prompt N), so some would not be trained on",
        "    1      0  advantage estimator gdpo",
    ]


def local(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """On a CPU with the tiny model and local data."""
    config["cluster"] = {"gpus_per_node": 0, "num_nodes": 1}
    policy = config["policy"]
    policy |= {"model_name": str(folder / "model"), "precision": "float32"}
    policy["tokenizer"] = {"name": str(folder / "model"), "chat_template": None}
    config["logger"] |= {"log_dir": str(folder / "logs"), "tensorboard_enabled": False}
    config["checkpointing"] |= {"checkpoint_dir": str(folder / "checkpoints"), "enabled": False}
    return config


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_a_migrated_file_runs_two_steps_on_a_cpu(algorithm, tmp_path):
    write_model(tmp_path / "model")
    write_rows(tmp_path / "pairs.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    conversations = [
        [{"role": "user", "content": row["p"]}, {"role": "assistant", "content": row["c"]}] for row in rows
    ]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in conversations))
    config = local({"sft": sft_file, "dpo": dpo_file}[algorithm](), tmp_path)
    name = {"sft": "talk", "dpo": "pairs"}[algorithm]
    for part in ("train", "validation"):
        config["data"][part]["data_path"] = str(tmp_path / f"{name}.jsonl")
    if algorithm == "dpo":
        config["data"]["default"] |= {"prompt_key": "p", "chosen_key": "c", "rejected_key": "r"}
    theirs, ours = write(tmp_path / "their.yaml", config), tmp_path / "our.yaml"
    assert main([str(theirs), "-o", str(ours)]) == 0
    if algorithm == "sft":
        run_sft(load_sft_config(ours), local_policy, Console(quiet=True))
    else:
        run_dpo(load_dpo_config(ours), local_policy, Console(quiet=True))
    records = read_metrics(tmp_path / "logs/exp_001")
    # The schedule ticks once a step: 0.1, then 0.1 + 0.9 / 5 of the rate.
    rates = [record["train/learning_rate"] for record in records if "train/learning_rate" in record]
    assert rates == pytest.approx([1e-7, 2.8e-7])


def test_a_file_of_theirs_is_recognized_where_a_configuration_is_loaded(tmp_path, caplog):
    theirs = write(tmp_path / "their.yaml", grpo_file())
    with caplog.at_level(logging.INFO, "nemo_offload_rl"):
        loaded = load_grpo_config(theirs, ["grpo.seed=11", "grpo.num_prompts_per_step=4"])
    assert loaded.grpo.seed == 11 and loaded.grpo.num_prompts_per_step == 4
    assert "their.yaml is NeMo-RL's; what becomes of its keys:\ntaken over as they are: " in caplog.text
    with pytest.raises(ConfigError, match=r"not available here: validation that begins late"):
        load_grpo_config(theirs, ["++grpo.val_start_at=5"])


def test_the_guide_has_a_row_for_every_conversion_and_every_other_name():
    text = GUIDE.read_text(encoding="utf-8")
    for conversion in CONVERSIONS:
        names = dict.fromkeys(key.removesuffix(".*") for key in conversion.keys or conversion.reads)
        assert f"| {', '.join(f'`{name}`' for name in names)} | " in text
    for theirs, rule in RENAMED.items():
        assert isinstance(rule, Renamed)
        if rule.to != theirs:
            assert f"| `{theirs}` | `{rule.to}` |" in text
