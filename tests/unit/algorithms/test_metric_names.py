from __future__ import annotations

import pytest
from documented_metrics import documented, without_match

from nemo_offload_rl.algorithms.metric_names import (
    DPO_NAMES,
    GRPO_WITH,
    SFT_NAMES,
    data_set_problem,
    metric_problem,
    names_of,
)
from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.keys.master import EXEMPLARS, DistillationMasterConfig, GrpoMasterConfig
from nemo_offload_rl.utils.config import load_config


def exemplar(kind, *overrides):
    return validate_keys(load_config(EXEMPLARS[kind], overrides), kind)


SIZES = ("grpo.num_generations_per_prompt=16", "grpo.val_num_generations_per_prompt=1")
GRPO = names_of(exemplar(GrpoMasterConfig, *SIZES))


@pytest.mark.parametrize(
    "name",
    ["val:accuracy", "train:reward_mean", "train:pass_at_16", "train:reward_mean/gsm8k", "val:accuracy/a_b.c"],
)
def test_what_is_measured_can_rank_checkpoints(name):
    assert metric_problem(name, GRPO) is None


@pytest.mark.parametrize(
    ("names", "name", "words"),
    [
        (GRPO, "val:accurac", "did you mean val:accuracy?"),
        (GRPO, "val:reward_mean", "did you mean train:reward_mean?"),
        (GRPO, "val:pass_at_16", "did you mean train:pass_at_16?"),
        (GRPO, "train:reward_mean/", "does not measure"),
        (GRPO, "accuracy", "write train:NAME or val:NAME"),
        (SFT_NAMES, "val:val_loss", "did you mean val:loss?"),
        (SFT_NAMES, "val:accuracy", "did you mean val:token_accuracy?"),
        (SFT_NAMES, "val:reward", "choose one of loss, loss/<data set>, perplexity, "),
        (DPO_NAMES, "val:validation-default_loss", "choose one of accuracy, "),
    ],
)
def test_what_is_not_is_refused_with_what_was_meant(names, name, words):
    problem = metric_problem(name, names)
    assert problem is not None
    assert words in problem
    assert "\n" not in problem


def test_a_metric_about_a_data_set_needs_that_data_set_beside_others():
    sets = {"train": {"gsm8k", "math"}, "val": {"gsm8k"}}
    assert data_set_problem(None, sets) is None
    assert data_set_problem("train:reward_mean", sets) is None
    assert data_set_problem("train:reward_mean/math", sets) is None
    assert "choose one of gsm8k, math" in str(data_set_problem("train:reward_mean/maths", sets))
    assert "one data set only; write val:accuracy" in str(data_set_problem("val:accuracy/gsm8k", sets))


def test_every_documented_metric_is_computed_again_somewhere_or_measured_by_clocks_and_counters():
    """The tests of trainers and of whole runs compare these lists with the runs and with what plain code computes."""
    replays = "policy.router_replay.enabled=true"
    grpo = names_of(exemplar(GrpoMasterConfig, SIZES[0], "grpo.val_num_generations_per_prompt=16"))
    some = {"train": tuple(name for names, _ in GRPO_WITH for name in names)}
    prefixes = {"train": "train", "val": "validation"}
    computed = {
        f"{prefixes[prefix]}/{name}"
        for names in (grpo, some, names_of(exemplar(DistillationMasterConfig, replays)), SFT_NAMES, DPO_NAMES)
        for prefix, known in names.items()
        for name in known
    }
    told = {name for name in documented() if not name.startswith(("timing/", "residency/", "memory/", "data/"))}
    on_gpus = {"train/training_mfu", "plan/<phase>_gib", "plan/<stage>_s"}  # see test_flops.py and test_plan.py
    assert without_match(told, computed) == on_gpus
    assert without_match(computed, told) == set()
