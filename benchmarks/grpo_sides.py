"""The sides of `grpo_vs_peers.py`: one work, done by this project, by TRL's GRPOTrainer and by verl's main program.

Each `run_*` does the work in this process, or in one that it starts, and returns the seconds of each step by phase. TRL
and verl are installed packages: of verl the program is started with overrides, of TRL methods are timed from outside.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from common import CPU_OVERRIDES, ROOT, json_lines, medians, steps_in

PHASES = ("refit", "generation", "logprobs", "reference", "training", "step")
OURS = ("dtensor", "megatron")
SIDES = (*OURS, "verl", "trl")
PROMPT_TOKENS, PROMPT_ROOM = 8, 16  # of each prompt, and the most that one may have

# Names of one phase: here, in our metrics, and in those of verl. Of TRL the phases are timed below.
IN_OURS = {"reference": "reference_logprobs", "step": "total"}
IN_VERL = {
    "refit": "update_weights",
    "generation": "gen",
    "logprobs": "old_log_prob",
    "reference": "ref",
    "training": "update_actor",
    "step": "step",
}
# What verl's file logger and verl's processes read.
VERL_METRICS = "verl/metrics.jsonl"
VERL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(len(set(solution_str)))
"""
MEGATRON = (
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.optimizer=null",
    "policy.scheduler=null",
    "policy.make_sequence_length_divisible_by=64",
)


@dataclass(frozen=True)
class Work:
    """What every side does in a step.

    Attributes:
        shape: Of the random model.
        prompts: Prompts of a step.
        group: Responses to each.
        tokens: Of a response; a few end earlier.
        micro_batch: Responses of our training passes; `auto` lets the plan choose.
        logprob_micro_batch: Responses of our passes without gradients; `auto` lets the plan choose.
        peer_micro_batch: Responses of the peers' training passes, and of TRL's passes without gradients.
        peer_logprob_micro_batch: Responses of verl's passes without gradients.
        recomputes: Layers are computed again in the backward pass.
        peer_dtype: Of parameters and states of TRL and verl; our parameters are float32.
        engine_share: Share of the GPU for verl's engine, which the policy leaves room for.
        trl_engine_share: The same of TRL's, whose policy stays on the GPU.
    """

    shape: str
    prompts: int
    group: int
    tokens: int
    micro_batch: int | Literal["auto"]
    logprob_micro_batch: int | Literal["auto"]
    peer_micro_batch: int
    peer_logprob_micro_batch: int
    recomputes: bool = False
    peer_dtype: str = "float32"
    engine_share: float = 0.6
    trl_engine_share: float = 0.6

    @property
    def num_responses(self) -> int:
        """Responses of a step."""
        return self.prompts * self.group

    def max_length(self, multiple: int = 1) -> int:
        """Tokens of the longest sequence, rounded up to a multiple."""
        length = self.tokens + PROMPT_ROOM
        return -(-length // multiple) * multiple


# At 8 B float32 parameters, gradients and states of TRL do not fit an H200 (docs/measurements/small-gpus.md).
WORKS = {
    "0.6B": Work("0.6B", 64, 8, 1024, 8, 32, 8, 32),
    "8B": Work(
        "8B", 16, 4, 512, 8, 8, 8, 8, recomputes=True, peer_dtype="bfloat16", engine_share=0.5, trl_engine_share=0.2
    ),
    "tiny": Work("tiny", 4, 2, 16, 2, 2, 2, 2),
}


def result_of(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Steps with seconds by phase, and the medians over those after the first, which compiles."""
    return {"steps": steps, "median": medians(steps, PHASES)}


def questions(count: int) -> list[str]:
    """The prompts of the peers; ours are additions of the same length."""
    return [f"{10 + i % 90}+{10 + i * 7 % 90}=" for i in range(count)]


# -- ours


def our_config(work: Work, backend: str, folder: Path, steps: int, *, on_cpu: bool = False) -> tuple[Path, list[str]]:
    """Configuration of one of our backends, and overrides for the work."""
    is_large, on_megatron = work.recomputes, backend == "megatron"
    name = "grpo_gpu"
    if is_large:
        name = "host_memory" if on_megatron else "large_model_8b"
    keys: dict[str, Any] = {
        "policy.model_name": folder / "model",
        "logger.log_dir": log_dir_of(folder, backend),
        "grpo.max_num_steps": steps,
        "grpo.num_prompts_per_step": work.prompts,
        "grpo.num_generations_per_prompt": work.group,
        "policy.train_global_batch_size": work.num_responses,
        "policy.train_micro_batch_size": work.micro_batch,
        "policy.logprob_batch_size": work.logprob_micro_batch,
        "policy.generation.max_new_tokens": work.tokens,
        "policy.max_total_sequence_length": work.max_length(64 if on_megatron else 1),
    }
    overrides = list(CPU_OVERRIDES) if on_cpu else []
    overrides += [f"{key}={value}" for key, value in keys.items()]
    if on_megatron:
        overrides += ["++policy.residency_overrides.params=device"] if is_large else MEGATRON
    return ROOT / "benchmarks" / f"{name}.yaml", overrides


def run_ours(
    work: Work, backend: str, folder: Path, steps: int, changes: Sequence[str], *, on_cpu: bool
) -> dict[str, Any]:
    """Our step: phases, all that was logged, and who held the GPU's memory in the last two steps."""
    from nemo_offload_rl.runs.loading import load_grpo_config
    from nemo_offload_rl.runs.rollouts import run_grpo
    from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE

    path, overrides = our_config(work, backend, folder, steps, on_cpu=on_cpu)
    run_grpo(load_grpo_config(path, [*overrides, *changes]))
    samples = json_lines(log_dir_of(folder, backend) / MEMORY_FILE)
    return our_result(folder, backend) | {"memory": [sample for sample in samples if sample["step"] > steps - 2]}


def our_result(folder: Path, backend: str) -> dict[str, Any]:
    """Phases of the steps that have ended, all of their metrics, and the micro-batches that the run took."""
    records = steps_in(log_dir_of(folder, backend))
    steps = [{name: record.get(f"timing/{IN_OURS.get(name, name)}_s", 0.0) for name in PHASES} for record in records]
    result = (result_of(steps) if steps else {"steps": []}) | {"records": records}
    config = log_dir_of(folder, backend) / "config.yaml"
    if not config.exists():
        return result
    policy = yaml.safe_load(config.read_text())["policy"]
    taken = {"training": policy["train_micro_batch_size"], "logprobs": policy["logprob_batch_size"]}
    return result | {"micro_batches": taken}


def log_dir_of(folder: Path, backend: str) -> Path:
    """The run folder of one of our backends."""
    return folder / backend


# -- TRL


def run_trl(work: Work, folder: Path, steps: int, changes: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """TRL's step; `changes` are of its configuration. On a CPU it generates without vLLM, to try this adapter."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    clock = _PhaseClock(torch.cuda.synchronize if torch.cuda.is_available() else lambda: None)
    if not on_cpu:
        _time_trl_engine(clock)

    class Timed(GRPOTrainer):
        """Tells logprobs of the policy from those of the reference, and both from the training pass."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            with clock.timed("generation"):
                return super()._generate_single_turn(*args, **kwargs)

        def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            with clock.timed("reference" if model is self.ref_model else "logprobs"):
                return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    class Steps(TrainerCallback):
        """Closes the books of each optimizer step."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            with (folder / "trl_steps.jsonl").open("a") as file:
                file.write(json.dumps(clock.end()) + "\n")

    def reward(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [float(len(set(text))) for text in completions]

    rows = [{"prompt": question} for question in questions(work.prompts * (steps + 1))]
    trainer = Timed(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=GRPOConfig(**{**trl_keys(work, folder, steps, on_cpu=on_cpu), **changes}),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Steps()],
    )
    trainer.train()
    result = trl_result(folder)
    if not on_cpu:
        result["torch_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def trl_keys(work: Work, folder: Path, steps: int, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of TRL's configuration."""
    keys: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": work.peer_micro_batch,
        "gradient_accumulation_steps": work.num_responses // work.peer_micro_batch,
        "num_generations": work.group,
        "max_completion_length": work.tokens,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "beta": 0.01,
        "bf16": not on_cpu,
        "gradient_checkpointing": work.recomputes,
        "model_init_kwargs": {"dtype": work.peer_dtype},
        "temperature": 1.0,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }
    if on_cpu:
        return keys | {"use_cpu": True}
    return keys | {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": work.trl_engine_share,
        "vllm_max_model_length": work.max_length(),
        "vllm_enable_sleep_mode": True,
    }


def trl_result(folder: Path) -> dict[str, Any]:
    """Phases of the steps that have ended."""
    steps = json_lines(folder / "trl_steps.jsonl")
    return result_of(steps) if steps else {"steps": []}


def _time_trl_engine(clock: _PhaseClock) -> None:
    """Count TRL's own part of a refit and vLLM's `reload_weights`, both inside of its generation, as the refit."""
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm import LLM

    def of_call(_: Any, method: Any = None, *args: Any) -> AbstractContextManager[Any]:
        return clock.timed("refit") if method == "reload_weights" else nullcontext()

    _wrap(VLLMGeneration, "sync_weights", lambda *_: clock.timed("refit"))
    _wrap(LLM, "collective_rpc", of_call)


class _PhaseClock:
    """Seconds by phase, with the GPU waited for; of a phase inside of another only the inner one counts."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []
        self._begin_s = 0.0

    @contextmanager
    def timed(self, name: str):
        self._wait()
        begin_s = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            self._wait()
            took_s = time.perf_counter() - begin_s
            self._seconds[name] = self._seconds.get(name, 0.0) + took_s - self._inner.pop()
            if self._inner:
                self._inner[-1] += took_s

    def begin(self) -> None:
        """Begin a step."""
        self._wait()
        self._seconds = {}
        self._begin_s = time.perf_counter()

    def end(self) -> dict[str, float]:
        """Seconds of the step; what no phase has is training."""
        self._wait()
        step_s = time.perf_counter() - self._begin_s
        return {**self._seconds, "training": step_s - sum(self._seconds.values()), "step": step_s}


def _wrap(owner: type, name: str, context: Callable[..., AbstractContextManager[Any]]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context(*args):
            return original(*args, **kwargs)

    setattr(owner, name, wrapped)


# -- verl


def run_verl(work: Work, folder: Path, steps: int, changes: Sequence[str], site: Path) -> dict[str, Any]:
    """Run verl in a process of its own.

    Args:
        work: The work.
        folder: Folder with `model`; verl's own model folder, data and metrics are written to `verl` in it.
        steps: Steps of the run.
        changes: Hydra overrides.
        site: Folder of verl and what it needs, which comes first on the path.
    """
    write_verl_inputs(work, folder, steps)
    subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *verl_overrides(work, folder, steps), *changes],
        env=verl_environment(folder, site),
        check=True,
    )
    return verl_result(folder)


def verl_result(folder: Path) -> dict[str, Any]:
    """Phases of the steps that have ended, and verl's peaks of memory in GB."""
    rows = [record.get("data", record) for record in json_lines(folder / VERL_METRICS)]
    steps = [
        {name: float(row.get(f"timing_s/{theirs}", 0.0)) for name, theirs in IN_VERL.items()}
        for row in rows
        if "timing_s/step" in row
    ]
    kept = ("actor/perf/max_memory_allocated_gb", "response_length/mean", "prompt_length/mean", "actor/grad_norm")
    records = [{name: row[name] for name in kept if name in row} for row in rows]
    return (result_of(steps) if steps else {"steps": []}) | {"records": records}


def write_verl_inputs(work: Work, folder: Path, steps: int) -> None:
    """Write the model with a tokenizer that verl's agent loop accepts, the prompts, and the reward."""
    import pandas
    from transformers import AutoTokenizer

    out = folder / "verl"
    (out / "model").mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for file in (folder / "model").iterdir():
        if file.suffix == ".safetensors":
            (out / "model" / file.name).symlink_to(file.resolve())
        else:
            shutil.copy(file, out / "model" / file.name)
    # It asks a tokenizer of Qwen3 for these two; nothing here uses them.
    tokenizer.add_tokens(["\n"])
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained(out / "model")
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, question in enumerate(questions(work.prompts * (steps + 1)))
    ]
    pandas.DataFrame(rows).to_parquet(out / "train.parquet")
    (out / "reward.py").write_text(VERL_REWARD)


def verl_environment(folder: Path, site: Path) -> dict[str, str]:
    """Environment of verl's processes."""
    path = os.pathsep.join([str(site.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    has_shim = (site / "verl_kit_shim.py").is_file()  # flash-attn's Triton kernel, and no import of TRL and Megatron
    return {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # a virtual machine may show little memory before it grows
        "HYDRA_FULL_ERROR": "1",
        "VERL_FILE_LOGGER_PATH": str((folder / VERL_METRICS).resolve()),
        **({"VERL_USE_EXTERNAL_MODULES": "verl_kit_shim"} if has_shim else {}),
    }


def verl_overrides(work: Work, folder: Path, steps: int) -> list[str]:
    """Hydra overrides of verl's main program for the work: FSDP2 with everything offloaded, vLLM on the same GPU.

    Rows are padded, since without flash-attn verl's packing gives attention a dense mask. All are about equally long.
    """
    out = (folder / "verl").resolve()
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[work.peer_dtype]
    keys: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_files": out / "train.parquet",
        "data.val_files": out / "train.parquet",
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": PROMPT_ROOM,
        "data.max_response_length": work.tokens,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": out / "model",
        "actor_rollout_ref.model.enable_gradient_checkpointing": work.recomputes,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": False,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.strategy": "fsdp2",
        f"{actor}.fsdp_config.param_offload": True,
        f"{actor}.fsdp_config.optimizer_offload": True,
        f"{actor}.fsdp_config.model_dtype": dtype,
        f"{actor}.fsdp_config.dtype": "bfloat16",
        f"{actor}.ppo_mini_batch_size": work.prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": work.peer_micro_batch,
        f"{actor}.use_kl_loss": True,
        f"{actor}.kl_loss_coef": 0.01,
        f"{actor}.kl_loss_type": "low_var_kl",
        f"{actor}.entropy_coeff": 0,
        f"{actor}.loss_agg_mode": "token-mean",
        f"{actor}.optim.lr": 1e-6,
        f"{actor}.optim.weight_decay": 0.01,
        f"+{actor}.optim.override_optimizer_config.fused": True,
        "actor_rollout_ref.ref.fsdp_config.strategy": "fsdp2",
        "actor_rollout_ref.ref.fsdp_config.param_offload": True,
        "actor_rollout_ref.ref.fsdp_config.model_dtype": dtype,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": work.peer_logprob_micro_batch,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": work.peer_logprob_micro_batch,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": work.group,
        f"{rollout}.temperature": 1.0,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": work.engine_share,
        f"{rollout}.free_cache_engine": True,
        f"{rollout}.max_model_len": work.max_length(),
        f"{rollout}.max_num_seqs": max(256, 2 * work.num_responses),
        f"{rollout}.enforce_eager": False,
        "reward.custom_reward_function.path": out / "reward.py",
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 4,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 4,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_epochs": 1000,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.logger": "[console,file]",
        "trainer.project_name": "peers",
        "trainer.experiment_name": "verl",
        "trainer.default_local_dir": out / "checkpoints",
        "hydra.run.dir": out / "hydra",
        "ray_kwargs.ray_init.num_cpus": 24,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 8_000_000_000,
    }
    return [f"{key}={value}" for key, value in keys.items()]
