"""The loop of a run with rollouts: its steps, and each step's rollouts, validation, save and log.

`grpo.py` and `distillation.py` show a step from top to bottom; docs/design/step.md explains its use of memory.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from nemo_offload_rl.algorithms.agreement import disagreement
from nemo_offload_rl.algorithms.checkpoints import Checkpoint
from nemo_offload_rl.algorithms.metrics import overlong_metrics, residency_metrics, validation_metrics
from nemo_offload_rl.algorithms.rollout_engine import RolloutEngine
from nemo_offload_rl.algorithms.rollout_log import sample_lines
from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
from nemo_offload_rl.algorithms.rollout_sampler import RolloutSampler, ServingEngine
from nemo_offload_rl.algorithms.run_end import RunEnd
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.errors import AgreementError, DataError
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.keys.generation import GenerationConfig
from nemo_offload_rl.keys.grpo import RolloutSectionConfig
from nemo_offload_rl.utils.timer import PhaseTimer, timing_metrics
from nemo_offload_rl.utils.traces import StepTraces

_REASONS = {
    "failed": "scoring failed",
    "timed_out": "the time limit was over; raise env.NAME.timeout_s",
    "no_reward": "no reward applies to it (all are None); correct the rewards of env.NAME, or the data",
}

# What the user sees of a step or a validation: metric and format, by label.
_FIGURES = {
    "loss": ("loss", ".4f"),
    "reward": ("reward_mean", ".3f"),
    "accuracy": ("accuracy", ".1%"),
    "length": ("mean_response_tokens", ".1f"),
    "cut off": ("truncation_rate", ".1%"),
    "KL": ("kl", ".4f"),
}
_ROLLOUT_PHASES = ("generation", "exposed_generation", "reward", "validation")


class RolloutLoop:
    """The parts of a step that all algorithms with rollouts share.

    Args:
        settings: The keys of the algorithm's section.
        generation: The keys `policy.generation.*`.
        parts: See `RolloutParts`.
        section: The algorithm's section of the configuration.
        bring: Moves the policy into its first phase of the step, once the engine sleeps.
        shown: What the user sees of a step: labels of `_FIGURES`.
        trains_on_rewards: Rollouts without a score are not trained on.

    Attributes:
        timer: Times the phases of a step.
        engine: Alternates engine and policy on the devices.
        sampler: Draws rollouts for validation and for `draw`.
        end: Ends the run.
    """

    def __init__(
        self,
        settings: RolloutSectionConfig,
        generation: GenerationConfig,
        parts: RolloutParts,
        *,
        section: str,
        bring: Callable[[], object],
        shown: Sequence[str],
        trains_on_rewards: bool = True,
    ) -> None:
        self._settings = settings
        self._generation = generation
        self._parts = parts
        self._logger = parts.logger
        self._progress = parts.progress
        self._section = section
        self._shown = shown
        self._trains_on_rewards = trains_on_rewards
        self.timer = PhaseTimer()
        self.engine = RolloutEngine(
            parts.policy,
            parts.engine,
            takes_turns=generation.engines_sleep,
            restart=lambda error: parts.memory.set_owners(parts.restart_engine(error)),
            timer=self.timer,
            bring=bring,
        )
        self.sampler = RolloutSampler(parts, self.engine, self.timer, settings.seed)
        traced = (parts.policy, self.engine)
        self._traces = StepTraces(parts.profile_steps, parts.logger.run_dir, traced, self.timer, parts.progress.note)
        self._total_tokens = 0.0
        self._last_validation: Mapping[str, float] | None = None  # of the last step; {} if it had none
        # Logged with the first step, by prefix.
        self._about_run = {"data": overlong_metrics(parts.overlong_rows), "plan": parts.planned}
        parts.memory.follow(self.timer.current)
        parts.progress.follow(self.timer.current)
        self.end = RunEnd(
            parts.checkpoints,
            parts.policy,
            parts.logger.run_dir,
            say=parts.progress.note,
            waits_for_rollouts=lambda: self.timer.current() in _ROLLOUT_PHASES,
            make_room=self.engine.make_room,
        )

    # -- the run

    def watching(self, last_step: int, resume_from: Checkpoint | None) -> AbstractContextManager[None]:
        """Return the context that the steps run in; see `RunEnd`."""
        return self.end.watching(0 if resume_from is None else resume_from.step, last_step)

    def steps(self, last_step: int, resume_from: Checkpoint | None) -> Iterator[int]:
        """Yield the numbers of the steps to run, after loading the checkpoint or else a validation at the start."""
        parts, step = self._parts, 0
        parts.checkpoints.warn_of_unranked(self._settings.val_period)
        if resume_from is not None:
            parts.checkpoints.load(resume_from, parts.policy, parts.loader)
            self._total_tokens, step = resume_from.total_tokens, resume_from.step
            self.engine.trained_steps = step
        elif self._settings.val_at_start:
            self._validate(0)
            self._logger.log(0, timing_metrics(self.timer.drain()), "timing")
            self._logger.commit()
        while step < last_step and parts.loader.num_batches_left:
            step += 1
            self._traces.begin(step)
            yield step
            self._traces.end(step)
            if self.end.step_done(step, last_step):
                break

    def end_early(self, step: int) -> None:
        """Validate and save as after a run's last step, because the data ended within the step after `step`."""
        if self._last_validation is None:
            return  # a resumed run that trained nothing
        checkpoints = self._parts.checkpoints
        is_ranked_anew = False
        if self._validation_is_due(step, is_last=True) and not self._validation_is_due(step, is_last=False):
            is_ranked_anew = checkpoints.ranks_by_validation
            self._last_validation = self._validate(step)
            self._logger.commit()
        if checkpoints.is_due(step, True) and (is_ranked_anew or not checkpoints.is_due(step, False)):
            self._save(self._last_validation)

    # -- a step

    def draw(
        self, step: int, draw: int, prompts: Sequence[Prompt], generated: Callable[[], object] | None = None
    ) -> RolloutBatch:
        """Draw the rollouts of a step's generation batch number `draw`.

        `generated` is called after the last generation, before its scoring.

        Raises:
            DataError: As in `check_useful`.
        """
        size, sampling, call = self._settings.num_generations_per_prompt, self._generation.sampling, f"{step}:{draw}"
        batch = self.sampler.draw(prompts, size, sampling, call, "generation", generated, trained_steps=step - 1)
        self.check_useful(step, batch)
        return batch

    def draw_ahead(
        self, batch: int, first: int, prompts: Sequence[Prompt], engine: ServingEngine, timer: PhaseTimer
    ) -> RolloutBatch:
        """Draw rollouts of prompts of a batch, from number `first` on, as `draw` would; runs in another thread."""
        size, sampling = self._settings.num_generations_per_prompt, self._generation.sampling
        sampler = self.sampler.for_thread(engine, timer)
        return sampler.draw(prompts, size, sampling, f"{batch}:0", "generation", trained_steps=batch - 1, first=first)

    def check_useful(self, step: int, batch: RolloutBatch) -> None:
        """Check the rollouts of a step.

        Raises:
            DataError: They have nothing to train on.
        """
        if not (batch.scored() if self._trains_on_rewards else batch.response_lengths()).any():
            lacking = "a score" if self._trains_on_rewards else "a token of the policy"
            reasons = [rollout.unscored for rollout in batch.rollouts if rollout.unscored is not None]
            why = f"; the first: {reasons[0].reason or _REASONS[reasons[0].why]}" if reasons else ""
            raise DataError(
                f"step {step}: not one of {len(batch)} rollouts has {lacking}, so there is nothing to train on{why}"
            )

    def rows_of_updates(self, rollouts: RolloutBatch) -> list[Tensor] | None:
        """Group the rows of `rollouts.collate` by update, equally many rollouts each; None if a rollout is one row."""
        owners = rollouts.row_owners()
        if len(owners) == len(rollouts):
            return None
        update_of_row = owners // self._parts.policy.rows_per_update
        return [(update_of_row == number).nonzero()[:, 0] for number in range(int(update_of_row.max()) + 1)]

    def trained(self, step: int, about_step: dict[str, float], *, checks_agreement: bool = True) -> None:
        """Log the metrics of a step's training, which include `num_tokens`, and add `total_tokens` to them.

        Raises:
            AgreementError: Engine and policy disagree too much to be the same model.
        """
        self.engine.trained_steps = step
        self._total_tokens += about_step["num_tokens"]
        about_step["total_tokens"] = self._total_tokens
        self.end.trained(step, self._parts.loader.state_dict(), about_step)
        self._logger.log(step, about_step, "train")
        for prefix, about_run in self._about_run.items():
            self._logger.log(step, about_run, prefix)
        self._about_run = {}
        error, outside_rate = about_step["token_mult_prob_error"], about_step["outside_nucleus_rate"]
        limit = self._settings.max_token_mult_prob_error if checks_agreement else None
        if (message := disagreement(step, error, outside_rate, limit, self._section)) is not None:
            raise AgreementError(message)

    def validate_if_due(self, step: int, *, is_last: bool) -> Mapping[str, float]:
        """Validate on held-out prompts with the present weights; return the metrics, empty if validation is not due."""
        self._last_validation = self._validate(step) if self._validation_is_due(step, is_last=is_last) else {}
        return self._last_validation

    def save_if_due(self, step: int, validation: Mapping[str, float], *, is_last: bool) -> None:
        """Save the step with the metrics of its validation, if a save is due."""
        if self.end.save_is_due(step, is_last):
            self._save(validation)

    @contextmanager
    def ending_step(self, step: int, about_step: Mapping[str, float]) -> Generator[None]:
        """Wrap the save of a step; afterwards log seconds and memory, and show the step."""
        try:
            yield
        finally:  # also after a failed save, since the metrics may show its cause
            seconds = self.timer.drain()
            self._logger.log(step, timing_metrics(seconds), "timing")
            self._logger.log(step, self._parts.memory.drain(step + 1), "memory")
        self._logger.log(step, residency_metrics(self._parts.policy.residency_reports()), "residency")
        self._logger.log(step, {"refit/sent_bytes": self.engine.take_sent_bytes()}, "residency")
        self._logger.commit()
        self._progress.step_done(step, shown_figures(about_step, self._shown), seconds)

    # -- inside

    def _validate(self, step: int) -> dict[str, float]:
        settings = self._settings
        prompts = self._parts.validation_prompts[: settings.max_val_samples]
        batches: list[RolloutBatch] = []
        for start in range(0, len(prompts), settings.val_batch_size):
            call, chunk = f"validation:{step}:{start}", prompts[start : start + settings.val_batch_size]
            size, sampling = settings.val_num_generations_per_prompt, self._generation.val_sampling
            batches.append(self.sampler.draw(chunk, size, sampling, call, "validation", trained_steps=step))
        rollouts = RolloutBatch.concatenate(batches)
        metrics = validation_metrics(rollouts)
        self._logger.log(step, metrics, "validation")
        self._progress.validated(step, shown_figures(metrics, ["accuracy"]))
        samples = sample_lines(rollouts, self._parts.num_samples_to_print)
        self._logger.log_samples(step, samples)
        for line in samples:
            self._progress.note(line)
        return metrics

    def _validation_is_due(self, step: int, *, is_last: bool) -> bool:
        settings = self._settings
        periodic = settings.val_period > 0 and step % settings.val_period == 0
        return bool(self._parts.validation_prompts) and (periodic or (is_last and settings.val_at_end))

    def _save(self, validation: Mapping[str, float]) -> None:
        with self.timer.phase("checkpoint"):
            if self._parts.checkpoints.exports_weights:
                self.engine.sleep()
            self.end.save(validation)


def shown_figures(metrics: Mapping[str, float], labels: Sequence[str]) -> dict[str, str]:
    """Format metrics for display, and the share of rollouts without a score if only some have none.

    If none has a score, as in a distillation without rewards, there is no reward and no accuracy.
    """
    named = {label: _FIGURES[label] for label in labels}
    shown = {label: format(metrics[name], kind) for label, (name, kind) in named.items() if name in metrics}
    without_score = sum(metrics[f"{why}_rate"] for why in _REASONS)
    return shown | ({"no score": f"{without_score:.1%}"} if 0 < without_score < 1 else {})
