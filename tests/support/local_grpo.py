"""GRPO runs in this process, without Ray and vLLM: the real trainer and policy, and Hugging Face for an engine."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tiny_models import make_qwen3, make_tokenizer

from nemo_offload_rl.algorithms.checkpoints import CheckpointKeeper, resume_point
from nemo_offload_rl.algorithms.grpo import GrpoTrainer
from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.distributed.local import start_local_policy
from nemo_offload_rl.environments.interfaces import Response, Score, Unscored
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.experience.rollouts import Turns
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.keys.master import GrpoConfig
from nemo_offload_rl.protocols.engine import Completion, joined_versions
from nemo_offload_rl.protocols.refit import WeightBucket
from nemo_offload_rl.runs.loading import load_grpo_config
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE, MemorySampler
from nemo_offload_rl.utils.progress import RunProgress
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryReceiver

ALWAYS, NEVER, MIXED = "always", "never", "mixed"
"""Reference answers: every response to such a prompt is right, none is, or every second one."""

LATE, BROKEN = "late", "broken"
"""Two more: as `MIXED` and `ALWAYS`, but every fourth response has no score, since that timed out or failed."""

SMALL = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=4",
    "policy.max_total_sequence_length=24",
    "policy.generation.max_new_tokens=6",
    "data.max_input_seq_length=16",
    "checkpointing.metric_name=null",
    "cluster.gpus_per_node=0",
)


class HuggingFaceEngine:
    """A `GenerationEngine`: every token from a full forward pass, weights by real refits.

    Attributes:
        temperature_error: The engine divides its logits by so much too much: another model than the policy's.
        logit_noise: Standard deviation of what is added to each of its logits.
        aborts: Responses end where they are.
        calls: What each call of `generate` gave: prompts, and their completions.
    """

    def __init__(self) -> None:
        self._model = make_qwen3(1)
        self._receiver = SharedMemoryReceiver()
        self.temperature_error = 1.0
        self.logit_noise = 0.0
        self.aborts = False
        self.calls: list[tuple[Sequence[Sequence[int]], list[list[Completion]]]] = []
        self.version = 0
        self._changes, self._num_open = threading.Lock(), 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        with self._changes:
            self._num_open += len(prompts) * num_samples
        try:
            groups = [
                [
                    self._complete(prompt, sampling, self._draws(sampling, place * num_samples + number))
                    for number in range(num_samples)
                ]
                for place, prompt in enumerate(prompts)
            ]
        finally:
            with self._changes:
                self._num_open -= len(prompts) * num_samples
        self.calls.append((prompts, groups))
        return groups

    def num_in_progress(self) -> int:
        return self._num_open

    @staticmethod
    def _draws(sampling: SamplingSettings, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(((sampling.seed or 0) + number) % 2**63)

    most_callers = 3

    def reserve(self) -> contextlib.AbstractContextManager[HuggingFaceEngine]:
        return contextlib.nullcontext(self)

    @torch.no_grad()
    def _complete(self, prompt: Sequence[int], sampling: SamplingSettings, draws: torch.Generator) -> Completion:
        token_ids: list[int] = []
        logprobs: list[float] = []
        for _ in range(sampling.max_new_tokens):
            if self.aborts:
                return self._completion(token_ids, logprobs, "abort")
            logits_V = self._model(input_ids=torch.tensor([[*prompt, *token_ids]])).logits[0, -1]
            if self.logit_noise:
                logits_V = logits_V + self.logit_noise * torch.randn(logits_V.shape, generator=draws)
            logprobs_V = (logits_V / ((sampling.temperature or 1.0) * self.temperature_error)).log_softmax(-1)
            if sampling.top_p < 1:
                probs_V, order_V = logprobs_V.exp().sort(descending=True)
                likelier_V = probs_V.cumsum(-1) - probs_V
                logprobs_V[order_V[likelier_V >= sampling.top_p]] = -torch.inf
                logprobs_V = logprobs_V.log_softmax(-1)
            greedy = sampling.temperature == 0
            token = int(logprobs_V.argmax() if greedy else torch.multinomial(logprobs_V.exp(), 1, generator=draws))
            token_ids.append(token)
            logprobs.append(float(logprobs_V[token]))
            if token % 5 == 0:  # often enough that lengths differ
                return self._completion(token_ids, logprobs, "stop")
        return self._completion(token_ids, logprobs, "length")

    def _completion(self, token_ids: list[int], logprobs: list[float], reason: str) -> Completion:
        return Completion(token_ids, logprobs, reason, joined_versions([[(self.version, len(token_ids))]]))

    def load_bucket(self, bucket: WeightBucket) -> None:
        weights = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in self._receiver.tensors(bucket):
                weights[name].copy_(tensor)

    def wait_for_room(self, tags: Sequence[str], extra_bytes: int = 0) -> bool:
        return True  # always awake

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        """Always awake."""

    def finish_generation(self, discard_weights: bool) -> None:
        """Always awake."""

    def finish_refit(self, version: int = 0) -> None:
        self.version = version

    def shutdown(self) -> None:
        self._receiver.close()


class PausableEngine(HuggingFaceEngine):
    """Takes new weights between two calls, which are of one group each."""

    def __init__(self) -> None:
        super().__init__()
        self._running = threading.Lock()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        with self._running:
            return super().generate(prompts, sampling, num_samples)

    def generate_each(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingSettings]
    ) -> list[Completion]:
        return [self.generate([prompt], each)[0][0] for prompt, each in zip(prompts, samplings, strict=True)]

    def abort_generation(self) -> None:
        self.aborts = True
        with self._running:
            self.aborts = False

    def pause_generation(self, recompute_kv_cache: bool) -> None:
        self._running.acquire()

    def resume_generation(self) -> None:
        self._running.release()


class KnownRewards:
    """Scores a response by the reference answer alone, see `ALWAYS`."""

    def step(self, responses: Sequence[Response]) -> list[Score | Unscored]:
        return [self._outcome(response.reference_answer, row) for row, response in enumerate(responses)]

    @staticmethod
    def _outcome(kind: str, row: int) -> Score | Unscored:
        if row % 4 == 3 and kind in (LATE, BROKEN):
            return Unscored("timed_out" if kind == LATE else "failed", "no judge")
        correct = kind in (ALWAYS, BROKEN) or (kind in (MIXED, LATE) and row % 2 == 0)
        return Score(reward=float(correct), correct=correct)

    def close(self) -> None:
        """Nothing to end."""


def make_prompts(kinds: Sequence[str], data_sets: Sequence[str] = ("only",)) -> tuple[Prompt, ...]:
    """One prompt for each kind of reward, of lengths that differ, from the data sets in turn."""
    tokenizer = make_tokenizer()
    texts = [f"{number}:" + "?" * (number % 3) for number in range(len(kinds))]
    return tuple(
        Prompt(
            token_ids=tuple(tokenizer.encode(text, add_special_tokens=False)),
            text=text,
            reference_answer=kind,
            env_name="arithmetic",
            data_set=data_sets[number % len(data_sets)],
        )
        for number, (text, kind) in enumerate(zip(texts, kinds, strict=True))
    )


@dataclass
class LocalGrpo:
    """A run in `folder`.

    Attributes:
        folder: Of the run; the model's is `folder`/../model.
        config: What it was made from.
        prompts: Training data.
        validation: Held-out prompts.
        environment: Scores the responses.
        restart: Starts the engine again after an error; None refuses.
        shown: What a person saw.
    """

    folder: Path
    config: GrpoConfig
    prompts: Sequence[Prompt]
    validation: Sequence[Prompt] = ()
    engine: HuggingFaceEngine = field(default_factory=HuggingFaceEngine)
    environment: Any = field(default_factory=lambda: KnownRewards())
    restart: Callable[[UserError], Mapping[int, str]] | None = None
    shown: str = ""

    def run(self) -> dict[int, dict[str, float]]:
        """Run to the end; metrics by step."""
        with contextlib.ExitStack() as stack:
            trainer, last_step, resume_from = self._make(stack)
            trainer.run(last_step, resume_from)
        return self.metrics()

    def metrics(self) -> dict[int, dict[str, float]]:
        """What the run has logged; later lines of a step add to earlier ones."""
        found: dict[int, dict[str, float]] = {}
        for line in (self.folder / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            found.setdefault(record.pop("step"), {}).update(record)
        return found

    def _make(self, stack: contextlib.ExitStack) -> tuple[GrpoTrainer, int, Any]:
        config, tokenizer, grpo = self.config, make_tokenizer(), self.config.grpo
        loader = ShuffledLoader(
            self.prompts,
            batch_size=grpo.prompts_per_generation_batch,
            shuffle=config.data.shuffle,
            seed=grpo.seed,
            num_epochs=grpo.max_num_epochs,
        )
        checkpoints = CheckpointKeeper(config.checkpointing)
        resume_from, last_step = resume_point(checkpoints, loader, grpo.max_num_steps, "grpo")
        run_logger = stack.enter_context(
            RunLogger(config.logger, config.resolved, resume_from.step if resume_from else None)
        )
        policy = start_local_policy(config.worker, config.loss_fn.reference_policy_kl_penalty != 0)
        stack.callback(policy.shutdown)
        policy.offload_after_refit()
        memory = stack.enter_context(MemorySampler({}, self.folder / MEMORY_FILE, 0.2, read=no_gpus))
        console = Console(file=io.StringIO(), width=200)
        stack.callback(lambda: setattr(self, "shown", console.file.getvalue()))  # type: ignore[attr-defined]
        progress = stack.enter_context(RunProgress(last_step, resume_from.step if resume_from else 0, console))
        parts = RolloutParts(
            policy=policy,
            engine=self.engine,
            restart_engine=self.restart or refuse_restart,
            environments={"arithmetic": self.environment},
            loader=loader,
            validation_prompts=self.validation,
            decode=lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True)),
            turns=Turns(max_turns=1, max_tokens=24, encode=lambda text, said: tokenizer.encode(text)),
            pad_id=256,
            width_multiple=config.policy.make_sequence_length_divisible_by,
            checkpoints=checkpoints,
            logger=run_logger,
            progress=progress,
            num_samples_to_print=config.logger.num_val_samples_to_print,
            memory=memory,
            speed=None,
            pausing=self.engine if isinstance(self.engine, PausableEngine) else None,
            keeps_paused=self.config.engine.kept_kv_bytes is not None,
        )
        trainer = GrpoTrainer(grpo, config.loss_fn, config.policy.generation, parts)
        return trainer, last_step, resume_from


def local_grpo(folder: Path, model: Path, kinds: Sequence[str], *overrides: str, **parts: Any) -> LocalGrpo:
    """A small run with prompts of the kinds; overrides come last."""
    paths = (
        f"policy.model_name={model}",
        f"logger.log_dir={folder}",
        f"checkpointing.checkpoint_dir={folder / 'checkpoints'}",
    )
    config = load_grpo_config("examples/configs/grpo_arithmetic_cpu.yaml", [*SMALL, *paths, *overrides])
    return LocalGrpo(folder, config, parts.pop("prompts", None) or make_prompts(kinds), **parts)


def taken_as_finished(max_age: int) -> tuple[str, ...]:
    """Overrides with which a step trains on the groups that have finished; for a `PausableEngine`."""
    keys = ("grpo.async_grpo.order=finished", "grpo.async_grpo.in_flight_weight_updates=true")
    return (*collected_ahead(max_age), *keys)


def collected_ahead(max_age: int) -> tuple[str, ...]:
    """Overrides with which rollouts are collected beside training."""
    return (
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=1",
        "policy.generation.colocated.resources.num_nodes=1",
        "policy.generation.vllm_cfg.async_engine=true",
        "loss_fn.use_importance_sampling_correction=true",
        "grpo.async_grpo.enabled=true",
        f"grpo.async_grpo.max_trajectory_age_steps={max_age}",
    )


def colocated_ahead(max_age: int) -> tuple[str, ...]:
    """Overrides with which rollouts stop while the policy trains; for a `PausableEngine`."""
    resources = "policy.generation.colocated.resources"
    shares = (
        "policy.generation.colocated.enabled=true",
        f"{resources}.gpus_per_node=null",
        f"{resources}.num_nodes=null",
    )
    return (*taken_as_finished(max_age), *shares)


def no_gpus() -> Mapping[str, Any]:
    return {}


def refuse_restart(error: UserError) -> Mapping[int, str]:
    raise error
