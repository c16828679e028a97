"""Every rule is broken once, through the whole loading path, by overrides of a configuration that passes."""

from __future__ import annotations

import inspect

import pytest
import torch

from nemo_offload_rl.backends.dtensor import rules as dtensor
from nemo_offload_rl.backends.dtensor.torch_optim import optimizer_spec
from nemo_offload_rl.backends.megatron import rules as megatron
from nemo_offload_rl.config.rules import GRPO_RULES, check_rules, memory, model, training
from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import GrpoMasterConfig
from nemo_offload_rl.runs.loading import load_grpo_config
from nemo_offload_rl.utils.config import load_config

CPU = "tests/unit/config/cpu.yaml"
MOMENTS = "policy.optimizer.name=nemo_offload_rl.optim.AdamW"
ONE_CYCLE = "{name: torch.optim.lr_scheduler.OneCycleLR, kwargs: {max_lr: 1.0, total_steps: 19}}"
PHASE = "{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}"

KEEPS_NONE = "{dataset_name: arithmetic, seed: 1, num_digits: 1, operators: ['+'], size: 9, holdout: 0}"
HALF_A_FILE = (
    "{dataset_name: ResponseDataset, path: a.jsonl, input_key: q, output_key: a, split_validation_size: 0.5, seed: 1}"
)

SINGLE = "grpo.dynamic_sampling_drops=responses"
WEIGHTED = "loss_fn.use_importance_sampling_correction=true"
SERVER = "policy.generation.vllm_cfg"
SERVES = (f"{SERVER}.expose_http_server=true", f"{SERVER}.async_engine=true")
OWN_DEVICES = (
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.generation.colocated.resources.num_nodes=1",
)
FINISHED = ["grpo.async_grpo.order=finished", "grpo.async_grpo.in_flight_weight_updates=true"]
SERVED = ["policy.generation.vllm_cfg.expose_http_server=true"]
AHEAD = [*OWN_DEVICES, "grpo.async_grpo.enabled=true", "policy.generation.vllm_cfg.async_engine=true"]
BOUNDED = "loss_fn.truncated_importance_sampling_ratio=2"

# rule name -> overrides that break it, and words that its message must have
TWO_SHARE = ["cluster.cpu_workers_per_node=2", "policy.dtensor_cfg.context_parallel_size=2"]
OFFLOADED_INPUTS = [f"policy.dtensor_cfg.{key}=true" for key in ("activation_offload", "activation_checkpointing")]
BROKEN: dict[str, list[tuple[list[str], str]]] = {
    "exactly_one_backend_is_enabled": [
        (["policy.megatron_cfg.enabled=true"], "enable exactly one"),
        (["policy.dtensor_cfg.enabled=false"], "are both false"),
    ],
    "megatron_trains_on_gpus": [
        (["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"], "megatron-core needs GPUs")
    ],
    "further_turns_answer_something": [
        (["grpo.max_rollout_turns=2"], "set env.arithmetic.retry_message"),
        (
            ["grpo.max_rollout_turns=2", "+env.math={num_workers: 0, retry_message: wrong}"],
            "set env.arithmetic.retry_message",
        ),
        (["+env.arithmetic.retry_message=wrong"], "leaves no turn to answer it"),
    ],
    "endpoint_can_be_served": [
        ([f"{SERVER}.expose_http_server=true"], "set async_engine to true"),
        ([f"{SERVER}.http_server_serving_chat_kwargs={{tool_parser: hermes}}"], "set that to true"),
        (
            [*SERVES, f"{SERVER}.http_server_serving_chat_kwargs={{chat_template: x}}"],
            "the keys are enable_auto_tools, tool_parser, reasoning_parser",
        ),
        ([*SERVES, "cluster.num_nodes=2"], "set it to 0.0.0.0, and the environment variable NEMO_OFFLOAD_RL_TOKEN"),
    ],
    "rollouts_fit_the_policy": [(["policy.generation.vllm_cfg.max_model_len=33"], "lower it to 32")],
    "engines_have_devices": [
        (["policy.generation.colocated.enabled=false"], "set both"),
        (["policy.generation.colocated.resources.num_nodes=1"], "set them to null"),
    ],
    "engine_fits_a_host_of_its_own": [
        (
            [
                "policy.generation.colocated.enabled=false",
                "policy.generation.colocated.resources.gpus_per_node=3",
                "policy.generation.colocated.resources.num_nodes=1",
                "policy.generation.vllm_cfg.tensor_parallel_size=2",
            ],
            "3 devices of policy.generation.colocated.resources.gpus_per_node",
        )
    ],
    "compiled_layers_are_whole": [
        (
            [
                "policy.dtensor_cfg.torch_compile=true",
                "policy.dtensor_cfg.tensor_parallel_size=2",
                "cluster.cpu_workers_per_node=2",
            ],
            "set torch_compile to false",
        ),
        ([*TWO_SHARE, "policy.dtensor_cfg.torch_compile=true"], "that context_parallel_size splits cannot be compiled"),
    ],
    "parallel_sizes_divide_the_world": [
        (["policy.dtensor_cfg.tensor_parallel_size=2"], "tensor_parallel_size 2 does not divide the 1 policy workers"),
        (
            [*TWO_SHARE, "policy.dtensor_cfg.tensor_parallel_size=2"],
            "tensor_parallel_size 2 x context_parallel_size 2 = 4 does not divide the 2 policy workers",
        ),
        (["cluster.cpu_workers_per_node=4", "policy.dtensor_cfg.expert_parallel_size=3"], "; use one of 1, 2, 4, or"),
    ],
    "shared_rows_are_not_packed": [
        ([*TWO_SHARE, "policy.sequence_packing.enabled=true"], "use policy.dynamic_batching instead")
    ],
    "shared_rows_exclude_divided_experts": [
        ([*TWO_SHARE, "policy.dtensor_cfg.expert_parallel_size=2"], "set one of them to 1")
    ],
    "engine_tensor_parallel_size_divides_a_host": [
        (["policy.generation.vllm_cfg.tensor_parallel_size=2"], "1 devices")
    ],
    "sequence_parallel_needs_tensor_parallel": [
        (["policy.dtensor_cfg.sequence_parallel=true"], "tensor_parallel_size is 1")
    ],
    "host_held_training_excludes_offload_keys": [
        (
            ["policy.dtensor_cfg.cpu_offload=true", "policy.offload_optimizer_states_for_logprob=true"],
            "set one of them to false",
        ),
        (
            ["policy.dtensor_cfg.cpu_offload=true", "policy.dtensor_cfg.offload_optimizer_states=true"],
            "policy.dtensor_cfg.offload_optimizer_states are both true",
        ),
    ],
    "host_held_training_recomputes_layers": [
        (["policy.dtensor_cfg.cpu_offload=true"], "set activation_checkpointing to true")
    ],
    "host_held_training_has_one_worker": [
        (["policy.dtensor_cfg.cpu_offload=true", "cluster.cpu_workers_per_node=2"], "there are 2 policy workers")
    ],
    "host_held_training_is_of_all_weights": [
        (["policy.dtensor_cfg.cpu_offload=true", "policy.dtensor_cfg.lora_cfg.enabled=true"], "lora_cfg.enabled are")
    ],
    "port_range_is_ascending": [(["cluster.master_port_range_low=30001"], "swap them")],
    "rollouts_fill_whole_training_batches": [
        (["policy.train_global_batch_size=96"], "does not divide the 128 responses")
    ],
    "training_batch_divides_over_workers": [(["cluster.cpu_workers_per_node=3"], "3 data-parallel workers")],
    "micro_batch_divides_the_workers_share": [(["policy.train_micro_batch_size=48"], "128 sequences of one worker")],
    "packing_and_dynamic_batching_exclude_each_other": [
        (["policy.sequence_packing.enabled=true", "policy.dynamic_batching.enabled=true"], "set one of them to false")
    ],
    "token_budgets_hold_the_longest_sequence": [
        (
            ["policy.dynamic_batching.enabled=true", "policy.dynamic_batching.logprob_mb_tokens=16"],
            "policy.dynamic_batching.logprob_mb_tokens 16 is below",
        ),
        (
            ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=63"],
            "63 is below policy.max_total_sequence_length 32 rounded up to 64, so a long sequence would",
        ),
    ],
    "longest_sequence_is_divisible": [(["policy.make_sequence_length_divisible_by=5"], "not a multiple of")],
    "prompts_leave_room_for_a_response": [
        (["data.max_input_seq_length=32"], "is not below policy.max_total_sequence_length 32"),
        (["policy.generation.vllm_cfg.max_model_len=24"], "is not below policy.generation.vllm_cfg.max_model_len 24"),
    ],
    "rollouts_are_not_greedy": [(["policy.generation.temperature=0"], "set it above 0")],
    "vllm_kwargs_are_allowed": [
        (["+policy.generation.vllm_kwargs.max_model_len=8"], "use policy.generation.vllm_cfg.max_model_len"),
        (["+policy.generation.vllm_kwargs.dtype=auto"], "use policy.generation.vllm_cfg.precision"),
        (["+policy.generation.vllm_kwargs.speculative_config={method: ngram}"], "the draft model would get no refits"),
        (["+policy.generation.vllm_kwargs.enable_eplb=true"], "experts would lie elsewhere"),
        (["+policy.generation.vllm_kwargs.data_parallel_size=2"], "the slots of the cluster decide"),
        (["+policy.generation.vllm_kwargs.hf_overrides={rope_theta: 1}"], "policy.hf_config_overrides make it"),
        (["+policy.generation.vllm_kwargs.max_num_seq=2"], "did you mean max_num_seqs?"),
    ],
    "every_environment_exists": [(["data.default.env_name=math"], "use one of arithmetic")],
    "weights_belong_to_a_list_of_rewards": [
        (
            ["+env.arithmetic.kwargs={a: 1}"],
            "env.arithmetic.kwargs is set, but env.arithmetic.target",
        ),
        (["+env.arithmetic.target=[]"], "env.arithmetic.target is an empty list"),
        (
            ["+env.arithmetic.target=a.b", "+env.arithmetic.weights=[1,2]"],
            "weights has 2 numbers, but target names 1 functions",
        ),
    ],
    "validation_has_rows": [
        (["data.train.holdout=0"], "data.train.holdout is 0, so there is nothing to validate on"),
        (
            [
                "~data.train",
                f"+data.train={{dataset_name: mixture, weights: [1, 2], datasets: [{KEEPS_NONE}, {KEEPS_NONE}]}}",
            ],
            "data.train.datasets.0.holdout and data.train.datasets.1.holdout are 0",
        ),
    ],
    "validation_sets_are_used_whole": [
        (
            [f"data.validation={KEEPS_NONE}"],
            "data.validation.holdout is 0, but validation uses only",
        ),
        ([f"data.validation={HALF_A_FILE}"], "set data.validation.split_validation_size to 0"),
        (
            [f"data.validation={{dataset_name: mixture, weights: [1], datasets: [{HALF_A_FILE}]}}"],
            "data.validation.datasets.0.split_validation_size is 0.5, but all rows",
        ),
    ],
    "mixtures_have_their_weights": [
        (["~data.train", "+data.train={dataset_name: mixture, weights: [], datasets: []}"], "at least one"),
        (
            [
                "~data.train",
                "+data.train={dataset_name: mixture, weights: [1, 2], datasets: [{dataset_name: arithmetic, seed: 1, "
                "num_digits: 1, operators: ['+'], size: 9, holdout: 1}]}",
            ],
            "one weight for each",
        ),
    ],
    "baselines_need_two_responses": [
        (["grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=128"], "set it to 2 or more"),
        (
            [
                "grpo.num_generations_per_prompt=1",
                "grpo.num_prompts_per_step=128",
                "grpo.adv_estimator.name=reinforce_plus_plus",
            ],
            "compare each response with its group",
        ),
        (
            [
                "grpo.num_generations_per_prompt=1",
                "grpo.num_prompts_per_step=128",
                "grpo.use_leave_one_out_baseline=false",
            ],
            "all would be 0",
        ),
    ],
    "dynamic_sampling_needs_groups": [
        (
            [
                "grpo.num_generations_per_prompt=1",
                "grpo.num_prompts_per_step=128",
                "grpo.use_leave_one_out_baseline=false",
                "grpo.use_dynamic_sampling=true",
            ],
            "turn dynamic sampling off",
        )
    ],
    "parts_of_groups_are_compared_by_the_package": [
        ([SINGLE], "set that to true, or this key to groups"),
        (
            [SINGLE, "grpo.use_dynamic_sampling=true", "grpo.num_generations_per_prompt=2"],
            "never differ; set it to 3 or more",
        ),
        (
            [SINGLE, "grpo.use_dynamic_sampling=true", "grpo.rollout_filter.target=json.dumps"],
            "or rollout_filter.target to null",
        ),
    ],
    "inputs_of_recomputed_layers_are_offloaded": [
        (
            [
                "policy.dtensor_cfg.activation_offload=true",
                "policy.dtensor_cfg.tensor_parallel_size=2",
                "cluster.gpus_per_node=2",
            ],
            "activations of split layers are not offloaded",
        ),
        ([*TWO_SHARE, "policy.dtensor_cfg.activation_offload=true"], "or context_parallel_size to 1"),
        (["policy.dtensor_cfg.activation_offload=true"], "set activation_checkpointing to true"),
        (
            [*OFFLOADED_INPUTS, "policy.dtensor_cfg.activation_offload_fraction=0.5"],
            "set it to 1.0, and limit their host memory by activation_offload_host_limit_gib",
        ),
    ],
    "save_deadline_is_a_time": [
        (["checkpointing.checkpoint_must_save_by='3:45:00'"], "write days:hours:minutes:seconds"),
        (["checkpointing.checkpoint_must_save_by='0:0:0:0'"], "is '0:0:0:0'"),
    ],
    "rollouts_can_be_collected_during_training": [
        (["grpo.async_grpo.enabled=true", WEIGHTED], "set async_grpo.order to finished"),
        (
            [*AHEAD, WEIGHTED, *FINISHED, "policy.generation.colocated.enabled=true", *SERVED],
            "calls of agents cannot wait",
        ),
        (["grpo.async_grpo.enabled=true", WEIGHTED, *OWN_DEVICES], "async_engine is false"),
        ([*AHEAD, WEIGHTED, "grpo.use_dynamic_sampling=true"], "turn one of them off"),
        (AHEAD, "use_importance_sampling_correction is false"),
        ([*AHEAD, WEIGHTED, "grpo.async_grpo.order=finished"], "in_flight_weight_updates is false"),
    ],
    "paused_responses_keep_their_cache_only_where_they_pause": [
        ([*AHEAD, WEIGHTED, "grpo.async_grpo.paused_kv=host"], "responses do not stop"),
        (
            [
                *AHEAD,
                WEIGHTED,
                *FINISHED,
                "policy.generation.colocated.enabled=true",
                "policy.generation.vllm_cfg.enable_sleep_mode=false",
                "grpo.async_grpo.paused_kv=host",
            ],
            "vllm_cfg.enable_sleep_mode is false, so responses do not stop",
        ),
        (
            [
                *AHEAD,
                WEIGHTED,
                *FINISHED,
                "policy.generation.colocated.enabled=true",
                "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true",
                "grpo.async_grpo.paused_kv=auto",
            ],
            "paused_kv is auto, but recompute_kv_cache_after_weight_updates is true",
        ),
    ],
    "only_dynamic_sampling_draws_larger_batches": [(["grpo.batch_multiplier=2"], "set it to 1 or")],
    "on_policy_ratio_needs_one_update_per_step": [
        (["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=64"], "make them equal")
    ],
    "truncation_needs_importance_sampling": [
        (["loss_fn.truncated_importance_sampling_ratio=2"], "set that to true"),
        (["loss_fn.truncated_importance_sampling_type=icepop"], "set that to true"),
        ([WEIGHTED, "loss_fn.truncated_importance_sampling_type=tis"], "the upper bound, is null"),
        ([WEIGHTED, "loss_fn.truncated_importance_sampling_ratio_min=0.5"], "the upper bound, is null"),
    ],
    "bounds_of_importance_weights_are_complete": [
        (
            [WEIGHTED, BOUNDED, "loss_fn.truncated_importance_sampling_ratio_min=3"],
            "ratio_min 3 is above truncated_importance_sampling_ratio 2",
        ),
        ([WEIGHTED, BOUNDED, "loss_fn.truncated_importance_sampling_type=icepop"], "0 masks on the upper side only"),
        (
            [
                *(WEIGHTED, BOUNDED, "loss_fn.truncated_importance_sampling_type=seq-mask-tis"),
                *("loss_fn.truncated_importance_sampling_ratio_min=1", "loss_fn.token_level_loss=false"),
                "loss_fn.sequence_level_importance_ratios=true",
            ],
            "the type to icepop",
        ),
    ],
    "one_surrogate": [
        (["loss_fn.use_cispo=true", "loss_fn.disable_ppo_ratio=true"], "set all but one to false"),
        (["loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3"], "with use_cispo the loss has no clip"),
        (["loss_fn.disable_ppo_ratio=true", "loss_fn.ratio_clip_c=3"], "set it to null"),
        (
            [
                *("loss_fn.use_cispo=true", "loss_fn.token_level_loss=false"),
                "loss_fn.sequence_level_importance_ratios=true",
            ],
            "weights single tokens",
        ),
    ],
    "constant_divisor_goes_with_the_sequence_loss": [
        (["loss_fn.constant_length_divisor=8"], "set token_level_loss to false or the divisor to null")
    ],
    "kl_in_reward_needs_rewards_of_tokens": [
        (["loss_fn.use_kl_in_reward=true"], "set it to reinforce_plus_plus, or use_kl_in_reward to false")
    ],
    "gdpo_compares_parts_of_rewards": [
        (["grpo.adv_estimator.name=gdpo"], "the environments of this package give one number"),
        (["grpo.adv_estimator.reward_weights=[1.0,2.0]"], "set the weights to null, or name to gdpo"),
        (["grpo.adv_estimator.name=gdpo", "grpo.reward_scaling.enabled=true"], "grpo.reward_scaling.enabled is true"),
    ],
    "kl_in_reward_needs_whole_distributions": [
        (
            [
                *("grpo.adv_estimator.name=reinforce_plus_plus", "loss_fn.use_kl_in_reward=true"),
                "policy.generation.top_k=5",
            ],
            "that top_p 1 and top_k 5 keep",
        )
    ],
    "advantage_bounds_are_ascending": [
        (["grpo.advantage_clip_low=1", "grpo.advantage_clip_high=-1"], "advantage_clip_low 1 is not below")
    ],
    "sequence_ratios_need_the_sequence_loss": [
        (["loss_fn.sequence_level_importance_ratios=true"], "set token_level_loss to false")
    ],
    "overlong_buffer_is_within_the_response": [(["grpo.reward_shaping.enabled=true"], "lower it")],
    "reward_ranges_are_ascending": [
        (["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.target_min=1"], "target_min 1 is not below")
    ],
    "optimizer_can_train": [
        (["policy.optimizer=null"], "set policy.optimizer.name"),
        (["policy.optimizer.name=torch.optim.AdamWW"], "did you mean torch.optim.AdamW?"),
        (["policy.optimizer.name=torch.optimm.AdamW"], "there is no module torch.optimm"),
        (
            ["policy.optimizer.name=torchao.optim.AdamW8bit"],
            "only classes of torch.optim and nemo_offload_rl.optim work",
        ),
        (["policy.optimizer.name=nemo_offload_rl.optim.Adam"], "did you mean nemo_offload_rl.optim.AdamW?"),
        (
            [MOMENTS, "+policy.optimizer.kwargs.exp_avg_dtype=float16"],
            "exp_avg_dtype is float16, not one of float32, b",
        ),
        (["policy.optimizer.name=torch.optim.lr_scheduler.StepLR"], "is not a kind of Optimizer"),
        (["policy.optimizer.name=torch.optim.Optimizer"], "is not a kind of Optimizer"),
        (["+policy.optimizer.kwargs.weight_decai=1"], "did you mean weight_decay?"),
        (["policy.optimizer.kwargs.lr=-1"], "Invalid learning rate: -1"),
        (["+policy.optimizer.kwargs.differentiable=true"], "cannot train"),
        (["+policy.optimizer.kwargs.capturable=true"], "capturable"),  # on CPU
    ],
    "scheduler_phases_can_step": [
        (["policy.scheduler=[{name: torch.optim.lr_scheduler.StepLR, kwargs: {}}]"], "has no step_size"),
        (["policy.scheduler=[{name: torch.optim.lr_scheduler.StepLr, kwargs: {}}]"], "did you mean"),
        (["policy.scheduler=[{name: torch.optim.AdamW, kwargs: {}}]"], "is not a kind of LRScheduler"),
        (["policy.scheduler=[{name: torch.optim.lr_scheduler.Optimizer, kwargs: {}}]"], "is not a kind of LRScheduler"),
        (
            [
                "grpo.max_num_steps=20",
                f"policy.scheduler=[{ONE_CYCLE}]",
            ],
            "which ends after 19 steps, but its phase has",
        ),
    ],
    "scheduler_milestones_separate_the_phases": [
        ([f"policy.scheduler=[{PHASE},{PHASE}]"], "2 phases and 0 milestones"),
        ([f"policy.scheduler=[{PHASE},{PHASE},{PHASE},{{milestones: [9,5]}}]"], "ascending"),
        ([f"policy.scheduler=[{PHASE},{{milestones: [9]}},{PHASE}]"], "last"),
    ],
    "checkpoint_metric_is_measured": [
        (["checkpointing.enabled=true", "checkpointing.metric_name=accuracy"], "write train:NAME or val:NAME"),
        (["checkpointing.enabled=true", "grpo.val_period=0"], "nothing is validated"),
        (
            [
                "checkpointing.enabled=true",
                "checkpointing.save_period=3",
                "grpo.val_period=7",
                "grpo.val_at_end=false",
                "grpo.max_num_steps=20",
            ],
            "none of the 20 steps has both a checkpoint (save_period=3) and a validation (grpo.val_period=7)",
        ),
        (["checkpointing.enabled=true", "checkpointing.metric_name=val:accurac"], "did you mean val:accuracy?"),
        (["checkpointing.enabled=true", "checkpointing.metric_name=train:reward"], "did you mean val:reward?"),
        (["checkpointing.enabled=true", "checkpointing.metric_name=train:pass_at_3"], "did you mean train:pass_at_"),
        (["checkpointing.enabled=true", "checkpointing.metric_name=train:filtered_accuracy"], "does not measure"),
        (["checkpointing.enabled=true", "checkpointing.metric_name=val:"], "choose one of accuracy, "),
    ],
    "only_engines_in_8_bits_keep_layers": [
        (["+policy.generation.vllm_cfg.use_deep_gemm=true"], "use_deep_gemm is set, but precision is float32"),
        (["+policy.generation.vllm_cfg.num_last_layers_in_bf16=2"], "num_last_layers_in_bf16 is set"),
        (["+policy.generation.vllm_cfg.quantization_ignored_layer_kws=[o_proj]"], "set precision to fp8"),
    ],
    "loggers_have_their_sections": [
        (["logger.wandb_enabled=true", "~logger.wandb"], "add it or set wandb_enabled"),
        (["logger.mlflow_enabled=true", "~logger.mlflow"], "add it or set mlflow_enabled"),
        (["logger.prometheus_enabled=true", "~logger.prometheus"], "add it or set prometheus_enabled"),
    ],
    "adapters_need_whole_layers": [
        (
            [
                "cluster.cpu_workers_per_node=2",
                "policy.dtensor_cfg.tensor_parallel_size=2",
                "policy.dtensor_cfg.lora_cfg.enabled=true",
            ],
            "set tensor_parallel_size to 1",
        )
    ],
    "adapters_have_their_layers": [
        (
            ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.match_all_linear=false"],
            "name layers, for instance",
        ),
        (
            ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.target_modules=[q_proj]"],
            "target_modules is [q_proj] and match_all_linear is true, which adapts every layer; set match_all_linear",
        ),
    ],
}

CASES = [(name, overrides, words) for name, cases in BROKEN.items() for overrides, words in cases]


# Of the DTensor backend's, those that read the model's config.json.
MODEL_RULES = (
    dtensor.dtensor_trains_the_model,
    dtensor.tensor_parallelism_splits_the_model,
    dtensor.sequence_parallelism_splits_the_model,
    dtensor.rows_of_the_model_can_be_shared,
    dtensor.host_held_training_draws_nothing,
    dtensor.host_held_layers_pass_on_hidden_states,
    dtensor.experts_divide_over_devices,
)


def test_every_rule_is_listed_and_broken_here() -> None:
    # In test_megatron_rules.py, test_memory_rules.py, test_model_rules.py and beside what phases need.
    listed = (*megatron.RULES, *memory.RULES, *model.RULES, *memory.ROLLOUT_RULES, *model.ROLLOUT_RULES)
    elsewhere = {rule.__name__ for rule in (*listed, *MODEL_RULES)}
    assert {rule.__name__ for rule in GRPO_RULES} - elsewhere == set(BROKEN)


@pytest.mark.parametrize(("name", "overrides", "words"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_a_broken_rule_ends_in_one_line_with_its_fix(name: str, overrides: list[str], words: str) -> None:
    rule = {rule.__name__: rule for rule in GRPO_RULES}[name]
    cfg = validate_keys(load_config(CPU, overrides), GrpoMasterConfig)
    message = rule(cfg)
    assert message is not None
    assert words in message
    assert "\n" not in message
    assert ";" in message, "the fix follows a semicolon"
    with pytest.raises(ConfigError):
        check_rules(cfg, GRPO_RULES)


def test_what_is_not_available_hides_what_follows_from_it() -> None:
    overrides = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true", "policy.optimizer=null"]
    with pytest.raises(ConfigError) as caught:
        load_grpo_config(CPU, [*overrides, "policy.train_micro_batch_size=48"])
    assert str(caught.value).count(";") == 1


def test_several_broken_rules_stay_in_one_line() -> None:
    with pytest.raises(ConfigError, match="; also ") as caught:
        load_grpo_config(CPU, ["policy.generation.temperature=0", "data.train.holdout=0"])
    assert "\n" not in str(caught.value)


def test_micro_batches_by_tokens_need_not_divide_the_batch() -> None:
    load_grpo_config(CPU, ["policy.dynamic_batching.enabled=true", "policy.train_micro_batch_size=48"])


def test_rules_accept_the_edges() -> None:
    load_grpo_config(
        CPU,
        [
            "grpo.num_generations_per_prompt=2",
            "policy.train_global_batch_size=32",
            "policy.generation.vllm_cfg.max_model_len=32",
            f"policy.scheduler=[{PHASE},{PHASE},{{milestones: [5]}}]",
            "grpo.val_period=0",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "data.train.holdout=0",
        ],
    )


def test_moments_of_16_bits_are_an_optimizer_of_the_package() -> None:
    optimizer = load_grpo_config(CPU, [MOMENTS, "+policy.optimizer.kwargs.exp_avg_dtype=float32"]).worker.optimizer
    assert optimizer is not None
    assert optimizer_spec(optimizer, on_gpu=False).bytes_per_element(torch.float32) == 6


def test_the_training_rules_have_one_list() -> None:
    functions = {n for n, f in inspect.getmembers(training, inspect.isfunction) if f.__module__ == training.__name__}
    assert {rule.__name__ for rule in training.RULES} == {name for name in functions if not name.startswith("_")}
