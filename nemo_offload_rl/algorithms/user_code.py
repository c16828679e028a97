"""A user's own parts of GRPO: the loss, advantages, the end of rollouts, the choice of rollouts to train on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from nemo_offload_rl.algorithms.advantages import in_rows
from nemo_offload_rl.algorithms.losses import ClippedPGLoss, is_inside, zero_where_masked
from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch, PreferenceBatch, TrainBatch
from nemo_offload_rl.environments.interfaces import Observation, Response, Score, Unscored
from nemo_offload_rl.environments.outcomes import plain_score
from nemo_offload_rl.errors import UserCodeError
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.keys.grpo import ClippedPGLossConfig, GrpoSectionConfig, OwnCodeConfig
from nemo_offload_rl.protocols.loss import LossFn, TokenStat
from nemo_offload_rl.targets import UserCode

_OF_ADVANTAGES = ("rewards", "parts", "correct", "truncated", "lengths", "mask", "scored")


@dataclass(frozen=True)
class GrpoCode:
    """A user's replacements of parts of GRPO.

    Attributes:
        loss: Replaces the clipped loss.
        adv_estimator: A function `(rewards, ...) -> advantages`; see `advantages`.
        rollout_filter: A function of a group's rollouts that returns for each whether it is trained on.
        rollout_stop: A function of a response and the environment's reply that tells whether the rollout ends there.
    """

    loss: UserLoss | None = None
    adv_estimator: UserCode | None = None
    rollout_filter: UserCode | None = None
    rollout_stop: UserCode | None = None

    @staticmethod
    def load(grpo: GrpoSectionConfig, loss: ClippedPGLossConfig) -> GrpoCode:
        """Import and check the code that the keys name.

        Raises:
            UserCodeError: The code cannot be used.
        """
        example, names = example_batch(PolicyGradientBatch), ("loss", "actor_loss")
        made = GrpoCode(
            loss=UserLoss.load(loss, ClippedPGLoss(loss), example, names=names),
            adv_estimator=_named("grpo.adv_estimator", grpo.adv_estimator),
            rollout_filter=_named("grpo.rollout_filter", grpo.rollout_filter),
            rollout_stop=_named("grpo.rollout_stop", grpo.rollout_stop),
        )
        if made.adv_estimator is not None:
            made.adv_estimator.check_named(_OF_ADVANTAGES)
        if made.rollout_filter is not None:
            made.rollout_filter.check_positional(("rollouts",))
        if made.rollout_stop is not None:
            made.rollout_stop.check_positional(("response", "observation"))
        return made

    def stopped(self, response: Response, observation: Observation) -> Score | Unscored | None:
        """Return the score of a rollout if the user's function ends it, else None.

        The function returns False to go on, True to end with the observation's fallback score, or a `Score`.

        Raises:
            UserCodeError: The function fails, or returns another value.
        """
        code = self.rollout_stop
        if code is None:
            return None
        found = code.call(response, observation)
        if isinstance(found, Score):
            try:
                return plain_score(found)
            except ValueError as error:
                raise UserCodeError(f"{code.label} ({code.place}): it returned {found!r:.80}; {error}") from error
        if not isinstance(found, bool):
            raise UserCodeError(
                f"{code.label} ({code.place}): it returned {kind_of(found)}; return True to end the rollout, False to "
                "go on, or a Score to end with"
            )
        return observation.otherwise if found else None

    def advantages(self, rollouts: RolloutBatch, rewards_PG: Tensor, mask_BS: Tensor) -> Tensor | None:
        """Compute advantages [B, S] with the user's function; None without one.

        The function gets, by name, the arguments that it has parameters for (P prompts, G responses to each,
        B = P * G): `rewards` [P, G] float32 after scaling and shaping (NaN without a score), `scored` [P, G] bool,
        `parts` (rewards before weights, a mapping of names to [P, G], NaN for a rollout without the part), `correct`
        and `truncated` [P, G] bool, `lengths` [P, G] of the responses in tokens, `mask` [B, S] of counted tokens. It
        returns [P, G], or [B, S] by token. In a group with an unscored rollout, NaN advantages (from a mean over all
        rewards, for example) become 0, so that these rollouts are not trained on.

        Raises:
            UserCodeError: The function fails, or returns another value.
        """
        code = self.adv_estimator
        if code is None:
            return None
        shape = rewards_PG.shape
        found = code.call_named(
            {
                "rewards": rewards_PG,
                "parts": {name: part.reshape(shape) for name, part in rollouts.reward_parts().items()},
                "correct": rollouts.correct().reshape(shape),
                "truncated": rollouts.truncated().reshape(shape),
                "lengths": rollouts.response_lengths().reshape(shape),
                "mask": mask_BS,
                "scored": rollouts.scored_PG(),
            }
        )
        if not isinstance(found, Tensor) or found.shape not in (shape, mask_BS.shape):
            raise UserCodeError(
                f"{code.label} ({code.place}): it returned {kind_of(found)}; return a tensor of shape "
                f"{tuple(shape)}, or {tuple(mask_BS.shape)} by token"
            )
        found = found.detach().to(torch.float32)
        owners = rollouts.row_owners()
        found = found if found.shape == mask_BS.shape else in_rows(found, mask_BS, owners)
        scored_PG = rollouts.scored_PG()
        in_whole_group = in_rows(scored_PG.all(dim=1, keepdim=True).expand_as(scored_PG), mask_BS, owners)
        if not (found.isfinite() | ~in_whole_group).all():
            raise UserCodeError(
                f"{code.label} ({code.place}): advantages are not all finite; do not divide by 0, and leave out "
                "rewards of NaN, of unscored rollouts (`scored`)"
            )
        return found.masked_fill(~(found.isfinite() & in_rows(scored_PG, mask_BS, owners)), 0.0)

    def kept(self, rollouts: RolloutBatch) -> Tensor | None:
        """Return a mask [B] float32, 0 for rollouts that the user's function leaves out; None without a function.

        Raises:
            UserCodeError: The function fails, or does not return one boolean for each rollout.
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


def _named(key: str, section: OwnCodeConfig | None) -> UserCode | None:
    if section is None or section.target is None:
        return None
    return UserCode.named(f"{key}.target", section.target, section.kwargs)


@dataclass(frozen=True)
class UserLoss:
    """A `LossFn` from a user's function `(logprobs, batch, norm) -> loss` or `-> (loss, metrics)`.

    It is pickled by value, so that policy workers on other hosts do not need its file. All metrics of the algorithm's
    own loss are measured too.

    Attributes:
        code: The function.
        standard: The algorithm's own loss.
        names: Metrics that report the value of the function's loss.
    """

    code: UserCode
    standard: LossFn
    names: tuple[str, ...] = ("loss",)

    @staticmethod
    def load(
        section: OwnCodeConfig | None, standard: LossFn, example: TrainBatch, names: tuple[str, ...] = ("loss",)
    ) -> UserLoss | None:
        """Load the loss that `loss_fn.target` names and try it on a batch; None if it names none.

        Raises:
            UserCodeError: The loss cannot be used.
        """
        if section is None or section.target is None:
            return None
        loss = UserLoss(UserCode.named("loss_fn.target", section.target, section.kwargs).by_value(), standard, names)
        loss.check(example)
        return loss

    @property
    def token_stat(self) -> TokenStat | None:
        return self.standard.token_stat

    def check(self, batch: TrainBatch) -> None:
        """Try the function on a small batch, such as `example_batch`.

        Raises:
            UserCodeError: The function cannot be called, fails, or returns no finite loss with a gradient.
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
        with torch.no_grad():
            _, measured = self.standard(logprobs_BS, batch, norm)
        returned: Any = self.code.call(*_inside_nucleus(logprobs_BS, batch), norm)
        returned_kind = kind_of(returned)
        loss, more = returned, {}
        if isinstance(returned, tuple) and len(cast(tuple[Any, ...], returned)) == 2:
            loss, more = cast(tuple[Any, Any], returned)
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not isinstance(more, Mapping):
            raise UserCodeError(
                f"{self._where}: it returned {returned_kind}; return a tensor of no dimensions, or that and a mapping "
                "of metrics"
            )
        metrics = cast(Mapping[str, Any], more)
        for name, value in metrics.items():
            if name in measured and name not in self.names:
                raise UserCodeError(f"{self._where}: its metric {name!r} is measured already; give it another name")
            if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
                raise UserCodeError(f"{self._where}: its metric {name!r} is {kind_of(value)}; make it one number")
        own = {name: _scalar(value, loss) for name, value in metrics.items()}
        return loss, {**own, **measured, **dict.fromkeys(self.names, loss.detach())}

    @property
    def _where(self) -> str:
        return f"{self.code.label} ({self.code.place})"


def _inside_nucleus(logprobs_BS: Tensor, batch: TrainBatch) -> tuple[Tensor, TrainBatch]:
    """Mask tokens outside the policy's nucleus in logprobs and batch, so that a function gets no infinity."""
    is_inside_BS = is_inside(logprobs_BS)
    if isinstance(batch, PolicyGradientBatch):
        is_inside_BS = is_inside_BS & is_inside(batch.prev_logprobs)
        batch = replace(batch, prev_logprobs=zero_where_masked(batch.prev_logprobs, is_inside_BS))
    batch = replace(batch, token_mask=batch.token_mask * is_inside_BS)
    return zero_where_masked(logprobs_BS, is_inside_BS), batch


def example_batch(kind: type[TrainBatch]) -> TrainBatch:
    """Make a batch of two short rows: GRPO's `PolicyGradientBatch`, a pair of DPO, or SFT's batch."""
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
    """Describe the type of a value that a user's function returned, for messages."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _scalar(value: float | Tensor, like: Tensor) -> Tensor:
    return value.detach().reshape(()) if isinstance(value, Tensor) else torch.tensor(float(value), device=like.device)
