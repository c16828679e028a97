"""A user's own loss, advantages and choice of rollouts in GRPO: `loss_fn.target` and the like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.algorithms.config import ClippedPGLossConfig, GrpoSectionConfig
from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch, TrainBatch
from nemo_offload_rl.errors import UserCodeError
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.targets import UserCode

_OF_ADVANTAGES = ("rewards", "correct", "truncated", "lengths", "mask")


@dataclass(frozen=True)
class UserLoss(ClippedPGLoss):
    """A function `(logprobs, batch, norm) -> loss` or `-> (loss, metrics)` in place of the clipped loss.

    It is pickled by value: policy workers on other hosts need not have its file. All metrics of the clipped loss are
    measured too, with `loss` and `actor_loss` as the function has it.
    """

    code: UserCode

    def check(self) -> None:
        """Try it on two short rows.

        Raises:
            UserCodeError: It cannot be called, fails, or returns no loss with a gradient.
        """
        self.code.check_positional(("logprobs", "batch", "norm"))
        mask = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
        logprobs = (torch.linspace(-2.0, -0.5, 8).reshape(2, 4) * mask).requires_grad_()
        batch = PolicyGradientBatch(
            input_ids=torch.ones(2, 4, dtype=torch.int64),
            input_lengths=torch.tensor([3, 4]),
            token_mask=mask,
            sample_mask=torch.ones(2),
            advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 4).contiguous(),
            prev_logprobs=logprobs.detach().clone(),
            generation_logprobs=logprobs.detach().clone(),
            reference_logprobs=logprobs.detach().clone(),
        )
        loss, _ = self(logprobs, batch, LossNorm(num_valid_seqs=2.0, num_valid_tokens=4.0))
        if not loss.requires_grad:
            raise UserCodeError(f"{self._where}: its loss has no gradient; compute it from logprobs, without detach")
        if not loss.isfinite():
            raise UserCodeError(f"{self._where}: its loss is {loss.item()} where all logprobs are finite; correct it")

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `LossFn`."""
        with torch.no_grad():
            _, measured = super().__call__(logprobs_BS, batch, norm)
        returned = self.code.call(logprobs_BS, batch, norm)
        loss, more = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not isinstance(more, Mapping):
            raise UserCodeError(
                f"{self._where}: it returned {_kind(returned)}; return a tensor of no dimensions, or that and a "
                "mapping of metrics"
            )
        own = {name: _scalar(value, loss) for name, value in more.items()}
        return loss, {**own, **measured, "loss": loss.detach(), "actor_loss": loss.detach()}

    @property
    def _where(self) -> str:
        return f"{self.code.label} ({self.code.place})"


@dataclass(frozen=True)
class GrpoCode:
    """What a user has put in the place of parts of GRPO.

    Attributes:
        loss: In place of the clipped loss.
        adv_estimator: A function `(rewards, ...) -> advantages`; see `advantages`.
        rollout_filter: A function from the rollouts of a group to whether each is trained on.
    """

    loss: UserLoss | None = None
    adv_estimator: UserCode | None = None
    rollout_filter: UserCode | None = None

    @staticmethod
    def load(grpo: GrpoSectionConfig, loss: ClippedPGLossConfig) -> GrpoCode:
        """Import and check what the keys name.

        Raises:
            UserCodeError: It cannot be used.
        """
        made = GrpoCode(
            loss=UserLoss(loss, code.by_value()) if (code := _named("loss_fn", loss)) is not None else None,
            adv_estimator=_named("grpo.adv_estimator", grpo.adv_estimator),
            rollout_filter=_named("grpo.rollout_filter", grpo.rollout_filter),
        )
        if made.loss is not None:
            made.loss.check()
        if made.adv_estimator is not None:
            made.adv_estimator.check_named(_OF_ADVANTAGES)
        if made.rollout_filter is not None:
            made.rollout_filter.check_positional(("rollouts",))
        return made

    def advantages(self, rollouts: RolloutBatch, rewards_PG: Tensor, mask_BS: Tensor) -> Tensor | None:
        """[B, S] by the user's function; None where there is none.

        It is given by name what it has parameters for: `rewards` [P, G] float32 after scaling and shaping, `correct`
        and `truncated` [P, G] bool, `lengths` [P, G] of the responses in tokens, `mask` [B, S] of the tokens that the
        loss counts; P prompts, G responses to each, B = P * G. It returns [P, G], or [B, S] by token.

        Raises:
            UserCodeError: It fails, or returns something else.
        """
        code = self.adv_estimator
        if code is None:
            return None
        shape = rewards_PG.shape
        found = code.call_named(
            {
                "rewards": rewards_PG,
                "correct": rollouts.correct().reshape(shape),
                "truncated": rollouts.truncated().reshape(shape),
                "lengths": rollouts.response_lengths().reshape(shape),
                "mask": mask_BS,
            }
        )
        if not isinstance(found, Tensor) or found.shape not in (shape, mask_BS.shape):
            raise UserCodeError(
                f"{code.label} ({code.place}): it returned {_kind(found)}; return a tensor of shape {tuple(shape)}, or "
                f"{tuple(mask_BS.shape)} by token"
            )
        if not found.isfinite().all():
            raise UserCodeError(f"{code.label} ({code.place}): advantages are not all finite; divide by no zero")
        found = found.detach().to(torch.float32)
        return found if found.shape == mask_BS.shape else found.reshape(-1, 1).expand_as(mask_BS)

    def kept(self, rollouts: RolloutBatch) -> Tensor | None:
        """[B] float32: 0 for rollouts that the user's function leaves out of the loss; None where there is none.

        Raises:
            UserCodeError: It fails, or returns something else than one boolean for each rollout.
        """
        code = self.rollout_filter
        if code is None:
            return None
        kept: list[float] = []
        for start in range(0, len(rollouts), rollouts.group_size):
            group = rollouts.rollouts[start : start + rollouts.group_size]
            found = code.call(group)
            with code.telling():
                answers = [bool(answer) for answer in found]
            if len(answers) != len(group):
                raise UserCodeError(
                    f"{code.label} ({code.place}): it returned {len(answers)} answers for {len(group)} rollouts; "
                    "return one for each"
                )
            kept += map(float, answers)
        return torch.tensor(kept)


def _named(key: str, section: Any) -> UserCode | None:
    if section is None or section.target is None:
        return None
    return UserCode.named(f"{key}.target", section.target, section.kwargs)


def _scalar(value: Any, like: Tensor) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(float(value), device=like.device)


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
