"""Configurations in NeMo-RL's format, small and written for the tests: no file of theirs."""

from __future__ import annotations

import copy
from typing import Any


def _policy() -> dict[str, Any]:
    batching = {"enabled": False, "train_mb_tokens": 256, "sequence_length_round": 8}
    return {
        "model_name": "meta-llama/Llama-3.2-1B",
        "tokenizer": {"name": "meta-llama/Llama-3.2-1B", "chat_template": None},
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 64,
        "precision": "bfloat16",
        "offload_optimizer_for_logprob": False,
        "make_sequence_length_divisible_by": 1,
        "max_grad_norm": 1.0,
        "dtensor_cfg": {
            "_v2": True,
            "enabled": True,
            "cpu_offload": False,
            "sequence_parallel": False,
            "activation_checkpointing": False,
            "tensor_parallel_size": 1,
            "context_parallel_size": 1,
            "custom_parallel_plan": None,
            "env_vars": {"PYTORCH_CUDA_ALLOC_CONF": ""},
        },
        "megatron_cfg": {"enabled": False, "checkpoint": {"async_save": True}, "mtp_num_layers": 0},
        "dynamic_batching": dict(batching),
        "sequence_packing": {**batching, "algorithm": "modified_first_fit_decreasing"},
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-6, "betas": [0.9, 0.99]}},
        "scheduler": [
            {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 5}},
            {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 100}},
            {"milestones": [5]},
        ],
    }


def _common(metric: str) -> dict[str, Any]:
    return {
        "logger": {
            "log_dir": "logs",
            "wandb_enabled": False,
            "tensorboard_enabled": True,
            "mlflow_enabled": False,
            "swanlab_enabled": False,
            "monitor_gpus": True,
            "gpu_monitoring": {"collection_interval": 10, "flush_interval": 10},
            "tensorboard": {"log_dir": "events"},
        },
        "cluster": {"gpus_per_node": 1, "num_nodes": 1},
        "checkpointing": {
            "enabled": True,
            "checkpoint_dir": "results/test",
            "metric_name": metric,
            "higher_is_better": False,
            "keep_top_k": 3,
            "save_period": 10,
            "checkpoint_must_save_by": None,
        },
    }


def grpo_file() -> dict[str, Any]:
    """GRPO on mathematics."""
    policy = _policy()
    del policy["tokenizer"]["chat_template"]
    policy["generation_batch_size"] = 32
    policy["logprob_batch_size"] = 2
    policy["generation"] = {
        "backend": "vllm",
        "max_new_tokens": 32,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": None,
        "stop_strings": None,
        "vllm_cfg": {
            "async_engine": False,
            "precision": "bfloat16",
            "kv_cache_dtype": "auto",
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "gpu_memory_utilization": 0.6,
            "max_model_len": 64,
            "enforce_eager": False,
        },
        "vllm_kwargs": {},
        "colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
        "mcore_generation_config": {"buffer_size_gb": 10, "kv_cache_management_mode": "persist"},
    }
    return {
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "max_rollout_turns": 1,
            "max_num_steps": 20,
            "normalize_rewards": True,
            "use_leave_one_out_baseline": True,
            "val_period": 10,
            "val_start_at": -1,
            "val_at_start": False,
            "max_val_samples": 8,
            "val_batch_size": 4,
            "seed": 7,
            "use_dynamic_sampling": False,
            "batch_multiplier": 1,
            "adv_estimator": {"name": "grpo", "normalize_rewards": True, "use_leave_one_out_baseline": True},
            "async_grpo": {"enabled": False, "max_trajectory_age_steps": 1},
        },
        "loss_fn": {
            "reference_policy_kl_penalty": 0.02,
            "reference_policy_kl_type": "k3",
            "ratio_clip_min": 0.2,
            "ratio_clip_max": 0.28,
            "ratio_clip_c": None,
            "use_cispo": False,
            "disable_ppo_ratio": False,
            "truncated_importance_sampling_type": None,
        },
        "policy": policy,
        "data": {
            "max_input_seq_length": 32,
            "shuffle": True,
            "num_workers": 1,
            "train": {"dataset_name": "OpenMathInstruct-2", "split_validation_size": 0.05, "seed": 7},
            "validation": None,
            "default": {
                "prompt_file": None,
                "system_prompt_file": None,
                "processor": "math_hf_data_processor",
                "env_name": "math",
            },
        },
        "env": {"math": {"num_workers": 2, "math_verify_impl": "hf_math_verify"}},
        **_common("val:accuracy"),
    }


def distillation_file() -> dict[str, Any]:
    """Distillation on mathematics: the data and the policy of GRPO, and a teacher that is another policy."""
    config = grpo_file()
    policy = config["policy"]
    teacher = copy.deepcopy(policy) | {"model_name": "meta-llama/Llama-3.2-3B", "precision": "float32"}
    teacher["dtensor_cfg"] |= {"context_parallel_size": 2}
    return {
        "distillation": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "max_rollout_turns": 1,
            "max_num_steps": 20,
            "max_num_epochs": 3,
            "val_period": 10,
            "val_at_start": False,
            "val_at_end": False,
            "max_val_samples": 10,
            "val_batch_size": 4,
            "topk_logits_k": 16,
            "seed": 7,
        },
        "loss_fn": {"kl_type": "mixed", "mixed_kl_weight": 0.25, "zero_outside_topk": False},
        "policy": policy,
        "teacher": teacher,
        "data": config["data"],
        "env": config["env"],
        **_common("val:accuracy"),
    }


def eval_file() -> dict[str, Any]:
    """Evaluation on AIME."""
    generation = grpo_file()["policy"]["generation"]
    engine = {k: v for k, v in generation["vllm_cfg"].items() if k != "kv_cache_dtype"} | {"expert_parallel_size": 1}
    sampling = ("backend", "max_new_tokens", "temperature", "top_p", "stop_token_ids", "stop_strings", "colocated")
    return {
        "eval": {"metric": "pass@k", "num_tests_per_prompt": 4, "seed": 7, "k_value": 2, "save_path": None},
        "generation": {
            **{name: generation[name] for name in sampling},
            "top_k": -1,
            "val_temperature": 1.0,
            "val_top_p": 1.0,
            "val_top_k": -1,
            "num_prompts_per_step": -1,
            "model_name": "meta-llama/Llama-3.2-1B",
            "vllm_cfg": engine,
        },
        "tokenizer": {"name": "meta-llama/Llama-3.2-1B", "chat_template": "default", "chat_template_kwargs": None},
        "data": {
            "max_input_seq_length": 64,
            "prompt_file": None,
            "system_prompt_file": None,
            "dataset_name": "AIME2024",
            "processor": "math_hf_data_processor",
            "repeat": 3,
        },
        "env": {"math": {"num_workers": 2}},
        "cluster": {"gpus_per_node": 1, "num_nodes": 1},
    }


def sft_file() -> dict[str, Any]:
    """SFT on conversations of a local file."""
    return {
        "sft": {
            "max_num_epochs": 1,
            "max_num_steps": 2,
            "val_period": 2,
            "val_batches": -1,
            "val_global_batch_size": 8,
            "val_micro_batch_size": 2,
            "val_at_start": True,
            "seed": 7,
            "only_unmask_final": False,
        },
        "policy": _policy(),
        "data": {
            "max_input_seq_length": 64,
            "add_bos": True,
            "add_eos": True,
            "add_generation_prompt": False,
            "shuffle": True,
            "num_workers": 1,
            "train": {"dataset_name": "openai_format", "data_path": "train.jsonl", "split": "train"},
            "validation": {"dataset_name": "openai_format", "data_path": "val.jsonl"},
            "default": {"prompt_file": None, "system_prompt_file": None, "processor": "sft_processor"},
        },
        **_common("val:val_loss"),
    }


def dpo_file() -> dict[str, Any]:
    """DPO on pairs of a local file."""
    return {
        "dpo": {
            "max_num_epochs": 1,
            "max_num_steps": 2,
            "val_period": 2,
            "val_batches": 8,
            "val_global_batch_size": 8,
            "val_micro_batch_size": 2,
            "val_at_start": True,
            "seed": 7,
            "reference_policy_kl_penalty": 0.05,
            "preference_average_log_probs": False,
            "preference_loss_weight": 1,
            "sft_loss_weight": 0,
        },
        "policy": _policy(),
        "data": {
            "max_input_seq_length": 64,
            "shuffle": True,
            "num_workers": 1,
            "train": {"data_path": "train.jsonl"},
            "validation": {"data_path": "val.jsonl"},
            "default": {
                "dataset_name": "BinaryPreferenceDataset",
                "prompt_key": "prompt",
                "chosen_key": "chosen",
                "rejected_key": "rejected",
            },
        },
        **_common("val:validation-default_loss"),
    }
