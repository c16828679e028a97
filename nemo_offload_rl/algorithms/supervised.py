"""The loop of SFT and DPO: batches of given data, one update each. A `Recipe` holds the differences between the two.

One step, in order:
1. data: the next rows of the loader become a batch;
2. reference_logprobs: logprobs of the frozen reference (DPO only);
3. training: forward, backward and the optimizer step of one global batch;
4. validation, when due: the loss on held-out data; a checkpoint, when due.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_offload_rl.algorithms.checkpoints import Checkpoint, CheckpointKeeper
from nemo_offload_rl.algorithms.metrics import overlong_metrics, residency_metrics, update_metrics
from nemo_offload_rl.algorithms.run_end import RunEnd
from nemo_offload_rl.data.batch import TrainBatch
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.data.records import Splits
from nemo_offload_rl.keys.supervised import SupervisedSectionConfig
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.protocols.loss import LossFn
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.memory_sampler import MemorySampler
from nemo_offload_rl.utils.progress import RunProgress
from nemo_offload_rl.utils.timer import PhaseTimer, timing_metrics
from nemo_offload_rl.utils.traces import StepTraces


class Recipe(Protocol):
    """Data and loss of one algorithm. Items are numbered from 0, separately for training and validation."""

    @property
    def data(self) -> Splits[Any]:
        """The items: examples, or pairs of examples."""
        ...

    @property
    def rows_per_item(self) -> int:
        """Number of rows of a batch that one item takes."""
        ...

    @property
    def loss(self) -> LossFn:
        """The loss to minimise."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Tells whether `complete` asks the policy for logprobs of the reference."""
        ...

    def begin(self, policy: Policy) -> None:
        """Compute what needs the policy's initial weights; called before a checkpoint is loaded."""
        ...

    def batch(self, items: Sequence[int], *, validation: bool) -> TrainBatch:
        """Collate items into tensors."""
        ...

    def complete(self, policy: Policy, batch: TrainBatch, items: Sequence[int], *, validation: bool) -> TrainBatch:
        """Add the reference's values that the loss reads to the batch."""
        ...

    def weight(self, batch: TrainBatch) -> float:
        """Return the batch's weight in a mean over batches: the number of tokens or pairs that its loss averages."""
        ...

    def data_metrics(self, batch: TrainBatch, training_s: float) -> dict[str, float]:
        """Return sizes of the batch, and rates from the seconds of its training."""
        ...

    def validation_metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Turn the means over a validation's batches into its metrics."""
        ...

    def figures(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Format the metrics of a step or validation that the user sees, by name."""
        ...

    def sample_lines(self, num_samples: int) -> Iterator[str]:
        """Yield the first validation items as text, or training items if there are none."""
        ...


@dataclass(frozen=True, kw_only=True)
class SupervisedParts:
    """Parts of an SFT or DPO run; `runs/supervised.py` builds them. `planned` are metrics of its plan."""

    policy: Policy
    recipe: Recipe
    loader: ShuffledLoader[int]
    checkpoints: CheckpointKeeper
    memory: MemorySampler
    num_samples_to_print: int
    planned: Mapping[str, float] = field(default_factory=dict[str, float])
    profile_steps: Sequence[int] = ()


class SupervisedTrainer:
    """Runs the steps.

    Args:
        settings: The keys that `sft.*` and `dpo.*` share.
        parts: Policy, data and loss.
        run_logger: Gets every metric.
        progress: Shows steps to the user.
    """

    def __init__(
        self, settings: SupervisedSectionConfig, parts: SupervisedParts, run_logger: RunLogger, progress: RunProgress
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._logger = run_logger
        self._progress = progress
        self._timer = PhaseTimer()
        traced, say = (parts.policy,), progress.note
        self._traces = StepTraces(parts.profile_steps, run_logger.run_dir, traced, self._timer, say)
        self._total_tokens = 0.0
        # Logged with the first step, by prefix.
        self._about_run = {"data": overlong_metrics(parts.recipe.data.overlong), "plan": parts.planned}
        parts.memory.follow(self._timer.current)
        progress.follow(self._timer.current)
        self._end = RunEnd(parts.checkpoints, parts.policy, run_logger.run_dir, say=progress.note)

    def run(self, last_step: int, resume_from: Checkpoint | None) -> None:
        """Train until `last_step`.

        Args:
            last_step: Number of the last step, from 1.
            resume_from: Checkpoint to continue; None starts with the first step.
        """
        step = 0 if resume_from is None else resume_from.step
        with self._end.watching(step, last_step):
            self._begin(resume_from)
            while step < last_step:
                step += 1
                self._traces.begin(step)
                self.step(step, is_last=step == last_step)
                self._traces.end(step)
                if self._end.step_done(step, last_step):
                    break

    def _begin(self, resume_from: Checkpoint | None) -> None:
        parts = self._parts
        parts.checkpoints.warn_of_unranked(self._settings.val_period)
        samples = list(parts.recipe.sample_lines(parts.num_samples_to_print))
        self._logger.log_samples(0, samples)
        for line in samples:
            self._progress.note(line)
        parts.recipe.begin(parts.policy)
        self._timer.drain()
        if resume_from is not None:
            parts.checkpoints.load(resume_from, parts.policy, parts.loader)
            self._total_tokens = resume_from.total_tokens
        elif self._settings.val_at_start:
            self.validate(0)
            self._logger.log(0, timing_metrics(self._timer.drain()), "timing")
            self._logger.commit()

    def step(self, step: int, is_last: bool) -> None:
        """Run one step."""
        parts, timer = self._parts, self._timer
        with timer.phase("data"):
            items = next(parts.loader)
            batch = parts.recipe.batch(items, validation=False)
        batch = self._complete(batch, items, validation=False)
        with timer.phase("training"):
            with timer.phase("enter"):
                parts.policy.prepare_for_training()
            with self._end.updating():
                result = parts.policy.train(batch, parts.recipe.loss)

        about_step = update_metrics(result) | parts.recipe.data_metrics(batch, timer.seconds()["training"])
        self._total_tokens += about_step["num_tokens"]
        about_step["total_tokens"] = self._total_tokens
        self._end.trained(step, parts.loader.state_dict(), about_step)
        self._logger.log(step, about_step, "train")
        for prefix, about_run in self._about_run.items():
            self._logger.log(step, about_run, prefix)
        self._about_run = {}
        validation = self.validate(step) if self._validation_is_due(step, is_last) else {}
        try:
            if self._end.save_is_due(step, is_last):
                with timer.phase("checkpoint"):
                    self._end.save(validation)
        finally:  # also after a failed save, since the metrics may show its cause
            seconds = timer.drain()
            self._logger.log(step, timing_metrics(seconds), "timing")
            self._logger.log(step, parts.memory.drain(step + 1), "memory")
        self._logger.log(step, residency_metrics(parts.policy.residency_reports()), "residency")
        self._logger.commit()
        self._progress.step_done(step, parts.recipe.figures(about_step), seconds)

    def validate(self, step: int) -> dict[str, float]:
        """Validate the present weights; log and return the means over all data and over each data set."""
        recipe, policy = self._parts.recipe, self._parts.policy
        micro_batch_size = self._settings.val_micro_batch_size * recipe.rows_per_item
        whole, by_set = _Mean(), dict[str, _Mean]()
        with self._timer.phase("validation"):
            policy.prepare_for_lp_inference()
            for name, items in self._validation_items():
                batch = self._complete(recipe.batch(items, validation=True), items, validation=True)
                result = policy.evaluate(batch, recipe.loss, micro_batch_size)
                found = {metric: value for metric, (value,) in {**result.metrics, "loss": result.loss}.items()}
                for mean in (whole, by_set.setdefault(name, _Mean())):
                    mean.add(found, recipe.weight(batch))
        metrics = recipe.validation_metrics(whole.values())
        if len(by_set) > 1:
            for name, mean in by_set.items():
                about_set = recipe.validation_metrics(mean.values())
                metrics |= {f"{metric}/{name}": value for metric, value in about_set.items()}
        self._logger.log(step, metrics, "validation")
        self._progress.validated(step, recipe.figures(metrics))
        return metrics

    def _complete(self, batch: TrainBatch, items: Sequence[int], *, validation: bool) -> TrainBatch:
        recipe, policy = self._parts.recipe, self._parts.policy
        if not recipe.needs_reference:
            return recipe.complete(policy, batch, items, validation=validation)
        with self._timer.phase("reference_logprobs"):
            policy.prepare_for_lp_inference()
            return recipe.complete(policy, batch, items, validation=validation)

    def _validation_items(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield the first validation items in batches of one data set each, with the data set's name."""
        size, rows = self._settings.val_global_batch_size, self._parts.recipe.data.validation
        by_set: dict[str, list[int]] = {}
        for item, row in enumerate(rows[: (self._settings.val_batches or len(rows)) * size]):
            by_set.setdefault(row.data_set, []).append(item)
        for name, items in by_set.items():
            for start in range(0, len(items), size):
                yield name, items[start : start + size]

    def _validation_is_due(self, step: int, is_last: bool) -> bool:
        settings = self._settings
        periodic = settings.val_period > 0 and step % settings.val_period == 0
        return periodic or (is_last and settings.val_at_end)


class _Mean:
    """Weighted mean over batches; 0 if all weights are 0."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._total = 0.0

    def add(self, values: Mapping[str, float], weight: float) -> None:
        self._total += weight
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * value

    def values(self) -> dict[str, float]:
        return {name: value / (self._total or 1.0) for name, value in self._sums.items()}
