"""Runs of a policy worker that stop and go on, for tests of every backend and residency setting."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from policy_cases import NLL, assert_equal, make_batch, shard
from torch import Tensor

from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.loss import TrainResult

MakeWorker = Callable[[], AbstractContextManager[PolicyWorker]]


@dataclass(frozen=True)
class Steps:
    """What steps of training gave, and the weights after the last."""

    results: list[TrainResult]
    weights: dict[str, Tensor]


def weights_of(worker: PolicyWorker) -> dict[str, Tensor]:
    """Full tensors under their Hugging Face names, whatever the phase."""
    with worker.residency.checkpoint_view():
        return {name: tensor.detach().clone() for name, tensor in worker.named_weights()}


def grpo_like_step(worker: PolicyWorker, step: int) -> TrainResult:
    """Logprobs, training, and a hand-over to an engine and back, as a step of GRPO has them; data from the step."""
    batch = shard(make_batch(seed=step), worker)
    worker.prepare_for_lp_inference()
    worker.get_logprobs(batch)
    worker.prepare_for_training()
    result = worker.train(batch, NLL())
    worker.offload_before_refit()
    for _ in worker.named_weights():
        pass
    worker.offload_after_refit()
    return result


def train_steps(worker: PolicyWorker, first: int, last: int) -> Steps:
    """Steps `first` to `last`, both included."""
    results = [grpo_like_step(worker, step) for step in range(first, last + 1)]
    return Steps(results, weights_of(worker))


def goes_on_bitwise(
    make_worker: MakeWorker, folder: Path, uninterrupted: Steps, *, in_background: bool, from_training: bool = False
) -> None:
    """Half of the steps, a save, and the other half by a new worker give bit by bit what they give in one go.

    Args:
        make_worker: Makes the same worker each time.
        folder: For the checkpoint.
        uninterrupted: All steps, by any setting that must not matter.
        in_background: Save while two more steps are done, which the checkpoint must know nothing of.
        from_training: Save with everything on the device, instead of with everything away.
    """
    num_steps = len(uninterrupted.results)
    half = num_steps // 2
    with make_worker() as worker:
        before = train_steps(worker, 1, half)
        assert before.results == uninterrupted.results[:half]
        if from_training:
            worker.prepare_for_training()
        worker.start_save(folder / "saved", in_background)
        train_steps(worker, half + 1, half + 2)
        worker.finish_save()
        assert [path.name for path in folder.iterdir()] == ["saved"]
    with make_worker() as worker:
        worker.load_checkpoint(folder / "saved")
        assert_equal(weights_of(worker), before.weights)
        torch.manual_seed(1234)  # a worker that did not restore its random state would differ from here on
        worker.load_checkpoint(folder / "saved")
        after = train_steps(worker, half + 1, num_steps)
    assert after.results == uninterrupted.results[half:]
    assert_equal(after.weights, uninterrupted.weights)
