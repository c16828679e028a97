"""Counts, reports and limits updates that are skipped because their gradient norm is not finite.

A NaN or an infinity in one gradient would spread to every parameter in the update. verl and Megatron-LM (for float16)
skip such updates too. A skipped update changes neither parameters nor optimizer states nor the schedule: training goes
on as if the batch did not exist.
"""

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from nemo_offload_rl.data.batch import PolicyGradientBatch, TrainBatch
from nemo_offload_rl.errors import NonFiniteGradientsError
from nemo_offload_rl.protocols.backend import StepResult
from nemo_offload_rl.protocols.loss import TrainResult
from nemo_offload_rl.residency import BASE, PARAMS, PARAMS_PART, StateGroup, local_tensor, row_of

logger = logging.getLogger(__name__)

WARNED_AFTER = 3
"""Steps in a row with gradients of exactly 0 before a warning."""


class SkippedUpdates:
    """Counts skipped updates in a row. Every rank counts the same, since they skip together.

    Args:
        max_in_a_row: Most skipped updates in a row; one more ends the run.
        groups: Lists the worker's state, whose parameters are checked before a run ends.
    """

    def __init__(self, max_in_a_row: int, groups: Callable[[], Iterable[StateGroup]] = tuple) -> None:
        self._max_in_a_row = max_in_a_row
        self._groups = groups
        self._in_a_row = 0
        self._since_save = [0, 0]  # applied, skipped

    @property
    def leave_nothing_to_save(self) -> bool:
        """Tells whether all updates since the last save, or since the start, were skipped, and there were some."""
        num_applied, num_skipped = self._since_save
        return bool(num_skipped) and not num_applied

    def saved(self) -> None:
        """Note that the state was saved."""
        self._since_save = [0, 0]

    def count(self, step: StepResult) -> None:
        """Count an update.

        A skipped update that lowers the loss scale of float16 is not counted: that is how the scale is found.

        Raises:
            NonFiniteGradientsError: Too many updates in a row were skipped.
        """
        self._since_save[step.is_skipped] += 1
        if not step.is_skipped:
            self._in_a_row = 0
        elif not step.lowers_loss_scale:
            self._in_a_row += 1
        if self._in_a_row > self._max_in_a_row:
            updates = f"{self._in_a_row} update{'s' if self._in_a_row > 1 else ''}"
            raise NonFiniteGradientsError(
                f"{updates} in a row had a gradient norm that is not finite (the last: {step.grad_norm}), more than "
                f"policy.max_skipped_updates={self._max_in_a_row}; none of them was applied. {self._advice()}"
            )

    def _advice(self) -> str:
        broken = parameters_not_finite(self._groups())
        if broken:
            return (
                f"{len(broken)} of this rank's parameters are not finite themselves, {broken[0]} first. Check the "
                "weights of policy.model_name, or of the checkpoint that was resumed."
            )
        return (
            "Look at train/loss and at the data of these steps, lower the learning rate, and resume from the last "
            "checkpoint, or raise the limit."
        )


@torch.no_grad()
def parameters_not_finite(
    groups: Iterable[StateGroup], host_view: Callable[[Tensor], Tensor | None] = lambda tensor: None
) -> list[str]:
    """List the names of parameters with a NaN or an infinity.

    Args:
        groups: All state.
        host_view: Returns the host copy of a tensor, None if it is on the device (`ResidencyManager.host_view`).
    """

    def is_broken(tensor: Tensor) -> bool:
        view = host_view(tensor)
        values = local_tensor(tensor) if view is None else view
        if not values.untyped_storage().nbytes():
            return False
        # A sum takes no memory. If it is not finite, it may have overflowed, so each value is checked.
        return not values.sum(dtype=torch.float32).isfinite() and not values.isfinite().all()

    return [
        name
        for group in groups
        if row_of(group.name) in (PARAMS, BASE, PARAMS_PART)
        for name, tensor in group.tensors()
        if isinstance(tensor, nn.Parameter) and is_broken(tensor)  # Megatron's flat buffers are listed too
    ]


class ZeroGradients:
    """Warns once if gradients are exactly 0 for several steps in a row although the batches have a learning signal.

    Such a run ends normally but learns nothing: a huge weight makes the output constant, or masks and clipping leave
    out every token.
    """

    def __init__(self) -> None:
        self._in_a_row = 0

    def count(self, batch: TrainBatch, result: TrainResult) -> None:
        """Count a step.

        Args:
            batch: All rows of the step, on the driver.
            result: Result of training on them.
        """
        has_target = bool(batch.loss_mask.any())
        if isinstance(batch, PolicyGradientBatch):
            has_target = bool((batch.advantages * batch.loss_mask).any())
        if not has_target or any(result.grad_norm):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row == WARNED_AFTER:
            logger.warning(
                "nothing was learned in the last %d steps: all gradients are exactly 0, although the batches have "
                "something to learn%s. A huge weight may make the output constant (see train/entropy and "
                "train/loss), or no token is left in the loss (see train/clip_fraction, train/is_oob_ratio and "
                "train/outside_nucleus_rate)",
                self._in_a_row,
                " (advantages are not 0)" if isinstance(batch, PolicyGradientBatch) else "",
            )


def warn_of_skipped(result: TrainResult) -> None:
    """Log one warning for all skipped updates of a step."""
    norms = [str(norm) for norm, is_skipped in zip(result.grad_norm, result.is_skipped, strict=True) if is_skipped]
    if norms:
        logger.warning(
            "%d of %d updates skipped: gradient norm %s; parameters, optimizer and schedule are as before",
            len(norms),
            len(result.is_skipped),
            ", ".join(norms),
        )
