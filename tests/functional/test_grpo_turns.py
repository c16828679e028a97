"""Rollouts of two turns in a whole run on CPU: what the engine sampled after an observation is what is trained on."""

from __future__ import annotations

import re

import pytest
from grpo_replay import read_rollouts

# Steps train on rollouts of the next prompts, drawn with the weights of the step before.
AHEAD = (
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.generation.colocated.resources.num_nodes=1",
    "policy.generation.vllm_cfg.async_engine=true",
    "loss_fn.use_importance_sampling_correction=true",
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.order=data",
)
# Any character of the demo's ends a response, so that an untrained model's have an end.
ENDS = "policy.generation.stop_token_ids=[4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19]"


def test_a_wrong_answer_gets_a_second_turn_and_engine_and_policy_agree_on_its_logprobs(
    model_folder, run_in_one_process, read_metrics, tmp_path
):
    done = run_in_one_process(
        f"policy.model_name={model_folder}",
        f"logger.log_dir={tmp_path / 'run'}",
        "grpo.max_num_steps=2",
        "grpo.max_rollout_turns=2",
        "env.arithmetic.retry_message='= '",
        "policy.max_total_sequence_length=48",
        # So many that vLLM would compute prompts of the second turn in chunks.
        "grpo.num_prompts_per_step=32",
        "policy.train_global_batch_size=256",
        "policy.train_micro_batch_size=128",
        "logger.num_val_samples_to_print=16",
        "policy.generation.val_temperature=1.0",
        # One update a step, so that the loss has no use for the logprobs before it.
        "loss_fn.force_on_policy_ratio=true",
        # What is never sampled is no disagreement between engine and policy.
        "policy.generation.temperature=0.8",
        "policy.generation.top_p=0.7",
        "policy.generation.top_k=8",
        ENDS,
    )
    assert done.status == 0, done.stderr
    # 16 of the prompt, 16 of each response, and 5 between them: the end, the two speakers and the message.
    assert "2 turns can take 53 tokens" in done.stderr
    for step in (1, 2):
        record = read_metrics(tmp_path / "run")[step]
        assert 1.5 < record["train/mean_turns"] <= 2
        assert record["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3)
        assert record["train/grad_norm"] > 1e-3
        assert record["train/probs_ratio_min"] == record["train/probs_ratio_max"] == 1.0
        assert not [name for name in record if name.startswith("timing/logprobs") or "logprob_tokens" in name]
    # What was said, what it was told, and what it said then.
    assert re.search(r"^  wrong  '<user>.*' -> '[^']+= [^']+', expected", done.stdout, re.MULTILINE), done.stdout


def test_a_chat_template_that_forgets_earlier_turns_ends_the_run_before_it_starts(model_folder, run_grpo, tmp_path):
    done = run_grpo(
        f"policy.model_name={model_folder}",
        f"logger.log_dir={tmp_path / 'run'}",
        "grpo.max_rollout_turns=2",
        "env.arithmetic.retry_message='= '",
        "policy.tokenizer.chat_template='{{ messages[-1].content }}'",
    )
    assert done.status == 2
    (line,) = done.stderr.splitlines()
    assert "does not show the assistant's response" in line
    assert not (tmp_path / "run").exists()


def test_agents_that_talk_http_train_on_what_the_engine_sampled_in_every_turn_of_every_conversation(
    model_folder, run_in_one_process, read_metrics, tmp_path
):
    done = run_in_one_process(
        f"policy.model_name={model_folder}",
        f"logger.log_dir={tmp_path / 'run'}",
        "grpo.max_num_steps=3",
        *AHEAD,
        "+env.sums={target: agents_of_tests.TwoTurns, kwargs: {hint: '= ', aside: true}, num_workers: 0}",
        "data.default.env_name=sums",
        "grpo.reward_shaping.enabled=false",
        "grpo.log_rollouts=true",
        "policy.max_total_sequence_length=64",
        "policy.generation.vllm_cfg.expose_http_server=true",
        "policy.generation.val_temperature=1.0",
        "policy.generation.temperature=0.8",
        "policy.generation.top_p=0.7",
        ENDS,
    )
    assert done.status == 0, done.stderr
    rollouts = read_rollouts(tmp_path / "run")
    for step, age in ((1, 0), (2, 1), (3, 1)):
        record = read_metrics(tmp_path / "run")[step]
        assert 1 < record["train/mean_conversations"] < 2
        assert record["train/mean_turns"] == pytest.approx(1 + record["train/mean_conversations"])
        # The policy's own logprobs of all conversations are those that the engine told over HTTP.
        assert record["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3 if age == 0 else 0.5)
        assert record["train/grad_norm"] > 1e-3
        assert record["train/avg_trajectory_age"] == record["train/avg_token_age"] == age
        for rollout in rollouts[step]:
            for conversation in (rollout, *rollout["other_conversations"]):
                assert conversation["weight_versions"] == [[step - 1 - age, sum(conversation["token_mask"])]]
