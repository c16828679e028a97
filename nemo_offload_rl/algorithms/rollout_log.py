"""Turns rollouts of training into plain records: prompts, responses, scores, and inputs of the loss by token."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.data.batch import PolicyGradientBatch, TrainBatch
from nemo_offload_rl.experience.types import Rollout, RolloutBatch, Segment
from nemo_offload_rl.protocols.engine import Versions, joined_versions


def rollout_records(
    groups: SampledGroups,
    rewards: Tensor,
    advantages: Tensor | None,
    batch: TrainBatch,
    *,
    has_prev: bool = False,
    has_reference: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield one record for each sampled rollout; `docs/reference/metrics.md` lists the fields.

    Args:
        groups: The step's groups.
        rewards: [B] rewards of the trained rollouts, after scaling and shaping.
        advantages: [B] mean advantage over the tokens of each trained rollout; None without advantages.
        batch: The trained rollouts as the loss gets them.
        has_prev: There was a logprob pass.
        has_reference: There is a reference.
    """
    of_gradient = batch if isinstance(batch, PolicyGradientBatch) else None
    row_of = {id(rollout): row for row, rollout in enumerate(groups.trained.rollouts)}
    for place, rollout in enumerate(groups.sampled.rollouts):
        row = row_of.get(id(rollout))
        in_loss = row is not None and bool(batch.sample_mask[row])
        has_score = rollout.unscored is None
        num_prompt, sequence = len(rollout.prompt.token_ids), rollout.sequences()[0]
        responses = slice(num_prompt, rollout.num_tokens)
        yield {
            "group": place // groups.sampled.group_size,
            **_about(rollout),
            "trained": in_loss,
            "shaped_reward": None if row is None or not has_score else rewards[row].item(),
            "advantage": None if row is None or not has_score or advantages is None else advantages[row].item(),
            "prompt_token_ids": list(rollout.prompt.token_ids),
            "token_ids": list(sequence.token_ids[num_prompt:]),
            "token_mask": list(sequence.token_mask[num_prompt:]),
            "generation_logprobs": list(sequence.generation_logprobs[num_prompt:]),
            "weight_versions": [list(pair) for pair in _versions(rollout.segments)],
            "prev_logprobs": _finite(of_gradient.prev_logprobs[row, responses])
            if of_gradient is not None and in_loss and has_prev
            else None,
            "reference_logprobs": _values(of_gradient.reference_logprobs[row, responses])
            if of_gradient is not None and in_loss and has_reference
            else None,
            "other_conversations": [
                {
                    "token_ids": list(other.token_ids),
                    "token_mask": list(other.token_mask),
                    "generation_logprobs": list(other.generation_logprobs),
                    "weight_versions": [list(pair) for pair in _versions(conversation.segments)],
                }
                for other, conversation in zip(rollout.sequences()[1:], rollout.others, strict=True)
            ],
        }


def _versions(segments: Sequence[Segment]) -> Versions:
    return joined_versions(segment.versions for segment in segments)


def _finite(logprobs_T: Tensor) -> list[float | None]:
    """Replace infinities, which JSON cannot represent, by None."""
    return [value if math.isfinite(value) else None for value in _values(logprobs_T)]


def _values(logprobs_T: Tensor) -> list[float]:
    return logprobs_T.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _about(rollout: Rollout) -> dict[str, Any]:
    return {
        "data_set": rollout.prompt.data_set,
        "prompt": rollout.prompt.text,
        "prompt_is_overlong": rollout.prompt.loss_multiplier == 0,
        "response": rollout.response_text,
        "reference_answer": rollout.prompt.reference_answer,
        **score_record(rollout),
        "reward_parts": {name: None if math.isnan(part) else part for name, part in rollout.reward_parts.items()},
        "reward_extra": dict(rollout.reward_extra),
        "truncated": rollout.truncated,
        "num_turns": rollout.num_turns,
        "stopped": rollout.stopped,
    }


def score_record(rollout: Rollout) -> dict[str, Any]:
    """Return `reward` and `correct`, None without a score, and `unscored`, the reason for a missing score."""
    has_score = rollout.unscored is None
    return {
        "reward": rollout.reward if has_score else None,
        "correct": rollout.correct if has_score else None,
        "unscored": None if rollout.unscored is None else rollout.unscored.why,
    }


def sample_lines(rollouts: RolloutBatch, num_samples: int) -> list[str]:
    """Format the first response to each of the first prompts, one a line, for people to read."""
    return [
        f"  {_verdict(rollout)}  {rollout.prompt.text!r} -> {rollout.response_text!r}"
        f"{' (cut off)' if rollout.truncated else ''}{_expected(rollout)}"
        for rollout in rollouts.rollouts[:: rollouts.group_size][:num_samples]
    ]


def _expected(rollout: Rollout) -> str:
    """Name the right answer; "" for a row without one."""
    answer = rollout.prompt.reference_answer
    return f", expected {answer!r}" if answer else ""


def _verdict(rollout: Rollout) -> str:
    if rollout.unscored is not None:
        return "unscored"
    return "right" if rollout.correct else "wrong"
