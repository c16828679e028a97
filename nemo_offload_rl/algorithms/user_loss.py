"""A user's own loss instead of GRPO's, SFT's or DPO's: `loss_fn.target`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from nemo_offload_rl.algorithms.losses import is_inside, zero_where_masked
from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch, PreferenceBatch, TrainBatch
from nemo_offload_rl.errors import UserCodeError
from nemo_offload_rl.keys.grpo import OwnCodeConfig
from nemo_offload_rl.protocols.loss import LossFn, TokenStat
from nemo_offload_rl.targets import UserCode


@dataclass(frozen=True)
class UserLoss:
    """A function `(logprobs, batch, norm) -> loss` or `-> (loss, metrics)`.

    It is pickled by value, so that policy workers on other hosts need not have its file. All metrics of the algorithm's
    own loss are measured too.

    Attributes:
        code: The function.
        standard: The algorithm's own loss.
        names: Metrics that are the value of the function's loss.
    """

    code: UserCode
    standard: LossFn
    names: tuple[str, ...] = ("loss",)

    @staticmethod
    def load(
        section: OwnCodeConfig | None, standard: LossFn, example: TrainBatch, names: tuple[str, ...] = ("loss",)
    ) -> UserLoss | None:
        """The loss that `loss_fn.target` names, tried on a batch; None if it names none.

        Raises:
            UserCodeError: It cannot be used.
        """
        if section is None or section.target is None:
            return None
        loss = UserLoss(UserCode.named("loss_fn.target", section.target, section.kwargs).by_value(), standard, names)
        loss.check(example)
        return loss

    @property
    def token_stat(self) -> TokenStat | None:
        """See `LossFn`."""
        return self.standard.token_stat

    def check(self, batch: TrainBatch) -> None:
        """Try it on a small batch, such as `example_batch`.

        Raises:
            UserCodeError: It cannot be called, fails, or returns no loss with a gradient.
        """
        self.code.check_positional(("logprobs", "batch", "norm"))
        size = batch.token_mask.numel()
        logprobs = torch.linspace(-2.0, -0.5, size).reshape(batch.token_mask.shape) * batch.token_mask
        norm = LossNorm(float(len(batch)), float(batch.loss_mask.sum()), batch.num_positive_tokens())
        loss, _ = self(logprobs.requires_grad_(), batch, norm)
        if not loss.requires_grad:
            raise UserCodeError(f"{self._where}: its loss has no gradient; compute it from logprobs, without detach")
        if not loss.isfinite():
            raise UserCodeError(f"{self._where}: its loss is {loss.item()} where all logprobs are finite; correct it")

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `LossFn`."""
        with torch.no_grad():
            _, measured = self.standard(logprobs_BS, batch, norm)
        returned = self.code.call(*_inside_nucleus(logprobs_BS, batch), norm)
        loss, more = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not isinstance(more, Mapping):
            raise UserCodeError(
                f"{self._where}: it returned {kind_of(returned)}; return a tensor of no dimensions, or that and a "
                "mapping of metrics"
            )
        for name, value in more.items():
            if name in measured and name not in self.names:
                raise UserCodeError(f"{self._where}: its metric {name!r} is measured already; give it another name")
            if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
                raise UserCodeError(f"{self._where}: its metric {name!r} is {kind_of(value)}; make it one number")
        own = {name: _scalar(value, loss) for name, value in more.items()}
        return loss, {**own, **measured, **dict.fromkeys(self.names, loss.detach())}

    @property
    def _where(self) -> str:
        return f"{self.code.label} ({self.code.place})"


def _inside_nucleus(logprobs_BS: Tensor, batch: TrainBatch) -> tuple[Tensor, TrainBatch]:
    """Logprobs and batch with tokens outside the policy's nucleus masked, so that a function gets no infinity."""
    is_inside_BS = is_inside(logprobs_BS)
    if isinstance(batch, PolicyGradientBatch):
        is_inside_BS = is_inside_BS & is_inside(batch.prev_logprobs)
        batch = replace(batch, prev_logprobs=zero_where_masked(batch.prev_logprobs, is_inside_BS))
    batch = replace(batch, token_mask=batch.token_mask * is_inside_BS)
    return zero_where_masked(logprobs_BS, is_inside_BS), batch


def example_batch(kind: type[TrainBatch]) -> TrainBatch:
    """Two short rows as a loss gets them: GRPO's `PolicyGradientBatch`, a pair of DPO, or SFT's batch."""
    mask_BS = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    plain = TrainBatch(
        input_ids=torch.ones(2, 4, dtype=torch.int64),
        input_lengths=torch.tensor([3, 4]),
        token_mask=mask_BS,
        sample_mask=torch.ones(2),
    )
    if kind is PreferenceBatch:
        return plain.as_kind(PreferenceBatch, reference_sums=torch.tensor([-3.0, -2.0], dtype=torch.float64))
    if kind is PolicyGradientBatch:
        logprobs_BS = torch.linspace(-2.0, -0.5, 8).reshape(2, 4) * mask_BS
        return plain.as_kind(
            PolicyGradientBatch,
            rewards=torch.tensor([1.0, 0.0]),
            advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 4).contiguous(),
            prev_logprobs=logprobs_BS,
            generation_logprobs=logprobs_BS,
            reference_logprobs=logprobs_BS,
        )
    return plain


def kind_of(value: object) -> str:
    """Type of a value that a user's function returned, for messages."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _scalar(value: float | Tensor, like: Tensor) -> Tensor:
    return value.detach().reshape(()) if isinstance(value, Tensor) else torch.tensor(float(value), device=like.device)
