"""Values of our keys that a NeMo-RL file does not have, so that it means what it means there: data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ABSENT: Mapping[str, Any] = {
    "grpo.val_period": 10,
    "grpo.max_val_samples": 256,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.normalize_rewards": True,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.reference_policy_kl_type": "k3",
    "sft.max_num_steps": 60,
    "sft.val_period": 10,
    "sft.val_at_end": False,
    "dpo.val_period": 25,
    "dpo.val_at_end": False,
}
"""What NeMo-RL takes for a key that its file leaves out, where our exemplar says otherwise or a function asks."""

_WEIGHT_DECAY = "policy.megatron_cfg.optimizer.weight_decay"

FOLLOWS: Mapping[str, tuple[str, str]] = {
    "policy.tokenizer.name": ("policy.model_name", "the model's"),
    "policy.logprob_batch_size": ("policy.train_micro_batch_size", "that of training"),
    "policy.dynamic_batching.logprob_mb_tokens": ("policy.dynamic_batching.train_mb_tokens", "those of training"),
    "policy.sequence_packing.logprob_mb_tokens": ("policy.sequence_packing.train_mb_tokens", "those of training"),
    "policy.generation.val_temperature": ("policy.generation.temperature", "that of rollouts"),
    "policy.generation.val_top_p": ("policy.generation.top_p", "that of rollouts"),
    "policy.generation.val_top_k": ("policy.generation.top_k", "that of rollouts"),
    "policy.generation.vllm_cfg.max_model_len": ("policy.max_total_sequence_length", "the policy's longest sequence"),
    "policy.generation.vllm_cfg.precision": ("policy.precision", "the policy's"),
    "policy.megatron_cfg.pipeline_dtype": ("policy.precision", "the policy's"),
    "policy.megatron_cfg.optimizer.clip_grad": ("policy.max_grad_norm", "the policy's limit"),
    "policy.megatron_cfg.scheduler.start_weight_decay": (_WEIGHT_DECAY, "the optimizer's"),
    "policy.megatron_cfg.scheduler.end_weight_decay": (_WEIGHT_DECAY, "the optimizer's"),
    "dpo.sft_average_log_probs": ("dpo.preference_average_log_probs", "that of the preference term"),
}
"""Our key, the key of ours whose value it takes, and why."""

FILLS: Mapping[str, tuple[Any, str]] = {
    "grpo.max_token_mult_prob_error": (None, "there is no such limit there"),
    "distillation.max_token_mult_prob_error": (None, "there is no such limit there"),
    "policy.sequence_packing.enabled": (False, "off where it is not in the file"),
    "policy.dynamic_batching.enabled": (False, "off where it is not in the file"),
    "policy.offload_optimizer_states_for_logprob": (False, "off where it is not in the file"),
    "policy.megatron_cfg.enabled": (False, "off where it is not in the file"),
    "policy.dtensor_cfg.enabled": (False, "off where it is not in the file"),
    "data.add_bos": (True, "the default there"),
    "data.add_eos": (True, "the default there"),
    "dpo.label_smoothing": (0.0, "there is none there"),
    "dpo.precompute_reference_logprobs": (False, "computed in each step there too"),
    "policy.optimizer.decay_norm_and_bias": (True, "torch's optimizer is given all parameters alike there"),
    "logger.numbered_runs": (True, "exp_001, exp_002 and so on below log_dir, as there"),
    "checkpointing.async_save": (False, "off where it is not in the file"),
}
"""Our key, its value, and why."""
