"""The loop of every algorithm that trains on what the policy itself answers, with colocated generation.

One step, in order (docs/design/step.md has the memory side of it):
1. refit: where the policy was trained since the last one, its weights go to the engine;
2. generation and reward: responses to each prompt, which the environments score, or answer, so that another turn
   follows; while the last is scored the engine goes to sleep and the policy comes back;
3. training, which is the algorithm's own;
4. validation, when due: refit, answers to held-out prompts; a checkpoint, when due.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from nemo_offload_rl.algorithms.agreement import disagreement
from nemo_offload_rl.algorithms.checkpoints import Checkpoint, CheckpointKeeper
from nemo_offload_rl.algorithms.config import RolloutSectionConfig
from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.algorithms.metrics import residency_metrics, validation_metrics
from nemo_offload_rl.algorithms.rollout_engine import RolloutEngine
from nemo_offload_rl.algorithms.rollout_log import sample_lines
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.agents import AgentEnvironment
from nemo_offload_rl.environments.interfaces import Environment
from nemo_offload_rl.errors import AgreementError, UserError
from nemo_offload_rl.experience.agent_rollouts import Endpoint, agent_rollouts
from nemo_offload_rl.experience.rollouts import Decode, Rollouts, Turns
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.generation.config import GenerationConfig
from nemo_offload_rl.generation.interfaces import GenerationEngine, SamplingSettings
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.utils.flops import ModelSpeed
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.memory_sampler import MemorySampler
from nemo_offload_rl.utils.progress import RunProgress
from nemo_offload_rl.utils.timer import PhaseTimer, timing_metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EndpointParts:
    """What agents talk to: the engines, the model's name there, and what they ask for."""

    engine: Endpoint
    model: str
    api_key: str


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What a run with rollouts is made of; `algorithms/rollout_setup.py` builds it.

    `restart_engine` takes the error after which the engine is needed again; it raises that error if no restart is left,
    and otherwise returns the owner of each process from then on.
    """

    policy: Policy
    engine: GenerationEngine
    restart_engine: Callable[[UserError], Mapping[int, str]]
    environments: Mapping[str, Environment | AgentEnvironment]
    loader: ShuffledLoader[Prompt]
    validation_prompts: Sequence[Prompt]
    decode: Decode
    turns: Turns
    pad_id: int
    width_multiple: int
    checkpoints: CheckpointKeeper
    num_samples_to_print: int
    memory: MemorySampler
    speed: ModelSpeed | None
    endpoint: EndpointParts | None = None


class RolloutTrainer[Settings: RolloutSectionConfig](ABC):
    """Runs the steps; an algorithm says what is sampled and how that is trained on.

    Args:
        settings: The keys of the algorithm's section.
        generation: The keys `policy.generation.*`.
        parts: Policy, engine, data and environments.
        run_logger: Gets every metric.
        progress: Shows steps to a person.

    Attributes:
        shown: Of the class: metrics of a step that a person is shown, by the name that they are shown under.
    """

    shown: ClassVar[Mapping[str, str]] = {"reward": "reward_mean"}

    def __init__(
        self,
        settings: Settings,
        generation: GenerationConfig,
        parts: RolloutParts,
        run_logger: RunLogger,
        progress: RunProgress,
    ) -> None:
        self._settings = settings
        self._generation = generation
        self._parts = parts
        self._logger = run_logger
        self._progress = progress
        self._timer = PhaseTimer()
        self._engine = RolloutEngine(
            parts.policy,
            parts.engine,
            colocated=generation.colocated.enabled,
            restart=lambda error: parts.memory.set_owners(parts.restart_engine(error)),
            timer=self._timer,
            bring=self._bring_policy,
        )
        self._total_tokens = 0.0
        self._about_last_step: dict[str, Mapping[str, float]] = {}  # metrics under `train` and `val`
        parts.memory.follow(self._timer.current)

    def _bring_policy(self) -> object:
        """Have the policy enter the phase of what `_train` computes first."""
        return self._parts.policy.prepare_for_lp_inference()

    @abstractmethod
    def _train(self, step: int, groups: SampledGroups) -> dict[str, float]:
        """Train on what was sampled, once the engine sleeps; the step's metrics, `num_tokens` among them."""

    def _sample(self, step: int) -> SampledGroups | None:
        """Rollouts to train on, the handover to the policy started; None if the data ended before a step was full."""
        groups = SampledGroups.all_of(self._draw(step, 0, next(iter(self._parts.loader)), is_last=True))
        self._engine.start_handover()
        return groups

    def run(self, last_step: int, resume_from: Checkpoint | None) -> None:
        """Train until `last_step`.

        Args:
            last_step: Number of the last step, from 1.
            resume_from: Where to go on; None starts with the first step.
        """
        settings, step, deadline = self._settings, 0, self._parts.checkpoints.deadline
        deadline.start()
        if resume_from is not None:
            self._parts.checkpoints.load(resume_from, self._parts.policy, self._parts.loader)
            step, self._total_tokens = resume_from.step, resume_from.total_tokens
        elif settings.val_at_start:
            accuracy = self.validate(0)["accuracy"]
            self._logger.log(0, timing_metrics(self._timer.drain()), "timing")
            self._logger.commit()
            self._progress.note(f"held-out accuracy before training: {accuracy:.1%}")
        while step < last_step and self._parts.loader.num_batches_left:
            if not self.step(step + 1, last_step):
                self._end_early(step)
                break
            step += 1
            self._parts.checkpoints.poll()
            if deadline.reached and step < last_step:
                self._progress.note(f"ended after step {step} of {last_step}: checkpointing.checkpoint_must_save_by")
                break
        self._parts.checkpoints.finish()

    def step(self, step: int, last_step: int) -> bool:
        """One step of the file header; False, and nothing is trained, where the data ended before the step was full."""
        parts, timer, where = self._parts, self._timer, self._parts.loader.state_dict()
        groups = self._sample(step)
        if groups is None:
            parts.loader.load_state_dict(where)  # a longer run begins this step anew
            return False
        is_last = step == last_step or not parts.loader.num_batches_left
        about_step = self._train(step, groups)
        self._total_tokens += about_step["num_tokens"]
        about_step["total_tokens"] = self._total_tokens
        self._logger.log(step, about_step, "train")
        self._check_agreement(step, about_step["token_mult_prob_error"])
        validation = self.validate(step) if self._validation_is_due(step, is_last) else {}
        self._about_last_step = {"train": about_step, "val": validation}
        parts.checkpoints.deadline.step_done()
        try:
            if parts.checkpoints.is_due(step, is_last):
                self._save(step)
        finally:  # the metrics of the step are there to find the cause of a save that fails
            seconds = timer.drain()
            self._logger.log(step, timing_metrics(seconds), "timing")
            self._logger.log(step, parts.memory.drain(step + 1), "memory")
        self._logger.log(step, residency_metrics(parts.policy.residency_reports()), "residency")
        self._logger.commit()
        figures = {shown: f"{about_step[name]:.3f}" for shown, name in self.shown.items()}
        if validation:
            figures["accuracy"] = f"{validation['accuracy']:.1%}"
        self._progress.step_done(step, figures, seconds)
        return True

    def validate(self, step: int) -> dict[str, float]:
        """Answer held-out prompts with the present weights; logs the metrics, shows samples, returns the metrics."""
        settings = self._settings
        prompts = self._parts.validation_prompts[: settings.max_val_samples]
        batches = []
        for start in range(0, len(prompts), settings.val_batch_size):
            call, chunk = f"validation:{step}:{start}", prompts[start : start + settings.val_batch_size]
            size, sampling = settings.val_num_generations_per_prompt, self._generation.val_sampling
            batches.append(self._rollouts(chunk, size, sampling, call, "validation"))
        rollouts = RolloutBatch.concatenate(batches)
        metrics = validation_metrics(rollouts)
        self._logger.log(step, metrics, "validation")
        samples = sample_lines(rollouts, self._parts.num_samples_to_print)
        self._logger.log_samples(step, samples)
        for line in samples:
            self._progress.note(line)
        return metrics

    # -- parts of a step -------------------------------------------------------------------------------------------

    def _draw(self, step: int, draw: int, prompts: Sequence[Prompt], *, is_last: bool) -> RolloutBatch:
        """Rollouts of one generation batch of a step; see `_rollouts`."""
        size, sampling = self._settings.num_generations_per_prompt, self._generation.sampling
        return self._rollouts(prompts, size, sampling, f"{step}:{draw}", "generation", is_last=is_last)

    def _end_early(self, step: int) -> None:
        """The data ended within the step after `step`: what belongs to a run's last step is done for `step`."""
        if not self._about_last_step:
            return  # a resumed run that trained nothing
        if self._validation_is_due(step, True) and not self._validation_is_due(step, False):
            self._about_last_step = {**self._about_last_step, "val": self.validate(step)}
            self._logger.commit()
        checkpoints = self._parts.checkpoints
        if checkpoints.is_due(step, True) and not checkpoints.is_due(step, False):
            self._save(step)

    def _rollouts(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: SamplingSettings,
        call: str,
        phase: str,
        is_last: bool = False,
    ) -> RolloutBatch:
        """Rollouts with the present weights, seeded by `call`; their seconds count as `phase` and as reward.

        With `is_last` the handover to the policy starts after the last turn, before that turn is scored. Agents drive
        theirs first.
        """
        parts = self._parts
        agents = {name: each for name, each in parts.environments.items() if isinstance(each, AgentEnvironment)}
        driven = [prompt.env_name in agents for prompt in prompts]
        if any(driven):
            others = [prompt for prompt, is_driven in zip(prompts, driven, strict=True) if not is_driven]
            own = [prompt for prompt, is_driven in zip(prompts, driven, strict=True) if is_driven]
            batch = self._agent_rollouts(own, agents, group_size, self._seeded(sampling, f"{call}:agents"), phase)
            rest = self._rollouts(others, group_size, sampling, call, phase, is_last) if others else None
            return batch if rest is None else RolloutBatch.interleave(batch, rest, driven)
        rollouts = Rollouts(
            prompts,
            group_size=group_size,
            environments={
                name: each for name, each in parts.environments.items() if not isinstance(each, AgentEnvironment)
            },
            decode=parts.decode,
            turns=parts.turns,
        )

        while rollouts.under_way:
            token_ids, num_samples = rollouts.prompts()
            turn = f":turn {rollouts.num_turns}" if rollouts.num_turns else ""
            seeded = self._seeded(sampling, call + turn)
            completions = self._engine.generate(token_ids, seeded, num_samples, phase=phase)
            if is_last and rollouts.in_last_turn:
                self._engine.start_handover()
            with self._timer.phase("reward"):
                rollouts.step(completions)
        return rollouts.batch()

    def _agent_rollouts(
        self,
        prompts: Sequence[Prompt],
        agents: Mapping[str, AgentEnvironment],
        group_size: int,
        sampling: SamplingSettings,
        phase: str,
    ) -> RolloutBatch:
        """Rollouts of prompts that are all agents'; their seconds count as `phase`, reward included."""
        parts = self._parts
        endpoint = parts.endpoint
        assert endpoint is not None, "checked when the environments are made"
        asked = {prompt.env_name for prompt in prompts}
        return self._engine.serve(
            lambda: agent_rollouts(
                prompts,
                group_size=group_size,
                environments={name: agent for name, agent in agents.items() if name in asked},
                endpoint=endpoint.engine,
                sampling=sampling,
                decode=parts.decode,
                model=endpoint.model,
                api_key=endpoint.api_key,
            ),
            phase=phase,
        )

    def _seeded(self, sampling: SamplingSettings, call: str) -> SamplingSettings:
        """Draws of one call of the engine depend on the run's seed and the call's name alone, also after a resume."""
        digest = hashlib.blake2b(f"{self._settings.seed}:{call}".encode(), digest_size=8).digest()
        return replace(sampling, seed=int.from_bytes(digest, "big") >> 1)

    def _check_agreement(self, step: int, error: float) -> None:
        """End a run whose engine and policy are two different models; the checkpoints that there are stay."""
        message = disagreement(step, error, self._settings.max_token_mult_prob_error)
        if message is not None:
            self._parts.checkpoints.finish()
            raise AgreementError(message)

    def _save(self, step: int) -> None:
        parts = self._parts
        with self._timer.phase("checkpoint"):
            if parts.checkpoints.exports_weights:
                self._engine.sleep()
            parts.checkpoints.save(step, parts.policy, parts.loader, self._about_last_step)

    def _validation_is_due(self, step: int, is_last: bool) -> bool:
        settings = self._settings
        periodic = settings.val_period > 0 and step % settings.val_period == 0
        return bool(self._parts.validation_prompts) and (periodic or (is_last and settings.val_at_end))
