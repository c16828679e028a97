"""What a GRPO run reports, computed again by plain code from the rollouts that it dumped (`grpo.log_rollouts`).

Nothing of the package computes anything here: the model is Hugging Face's, optimizer and schedule are torch's, and
every metric of docs/reference/metrics.md is its formula, in float64. A run is replayed from its first step, so that
later ones are compared too, and several updates of one step.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from itertools import batched, combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_offload_rl.keys.master import GrpoConfig

type Rollout = Mapping[str, Any]
type Metrics = dict[str, float]


def read_rollouts(run_dir: Path) -> dict[int, list[Rollout]]:
    """The dump of a run, by step."""
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"), key=lambda path: int(path.stem.removeprefix("step_")))
    records = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    return {step[0]["step"]: step for step in records}


class Replay:
    """The steps of a run, one after the other, from the model folder that it began with."""

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config
        self._model = AutoModelForCausalLM.from_pretrained(config.policy.model_name, dtype=torch.float32)
        # Padding is cut off, so that a token of that id was sampled and is trained on like any other.
        self._model.model.embed_tokens.padding_idx = None
        self._reference = copy.deepcopy(self._model).requires_grad_(False)
        assert config.policy.optimizer is not None and config.policy.optimizer.name == "torch.optim.AdamW"
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **config.policy.optimizer.kwargs)
        # The first phase of the schedule; runs here are shorter.
        phases = [
            getattr(torch.optim.lr_scheduler, phase.name.rpartition(".")[2])(self._optimizer, **phase.kwargs)
            for phase in config.policy.scheduler[:1]
        ]
        self._schedule = phases[0] if phases else None
        self._total_tokens = 0
        self._num_steps = 0

    def step(self, rollouts: Sequence[Rollout], timing: Metrics) -> Metrics:
        """Every metric under `train/` of the next step.

        Args:
            rollouts: What it dumped.
            timing: Its seconds, under their names in metrics.jsonl.
        """
        in_groups = [group for group in groups(rollouts) if any(r["advantage"] is not None for r in group)]
        trained = [rollout for group in in_groups for rollout in group]
        if self._config.grpo.dynamic_sampling_drops == "responses":
            trained = [rollout for rollout in trained if rollout["advantage"] is not None]
            for group in in_groups:
                for rollout in group:  # kept only if the others differ; the surplus of the last groups is dropped too
                    others = {other["reward"] for other in scored(group) if other is not rollout}
                    assert rollout["advantage"] is None or len(others) > 1
            assert len(trained) == self._config.grpo.num_prompts_per_step * self._config.grpo.num_generations_per_prompt
        judged = scored(trained)
        num_trained = sum(len(rollout["prompt_token_ids"]) + len(rollout["token_ids"]) for rollout in trained)
        self._total_tokens += num_trained
        ahead = "collector/" if self._config.grpo.is_async else ""
        found = about_rollouts(rollouts, self._config.grpo.num_generations_per_prompt)
        found |= spread("shaped_reward", [rollout["shaped_reward"] for rollout in judged])
        found |= spread("advantage", [rollout["advantage"] for rollout in judged])  # `_advantages` computes them again
        found |= {
            "num_tokens": float(num_trained),
            "total_tokens": self._total_tokens,
            "logprob_tokens_per_s": num_trained / timing["timing/logprobs_s"],
            "training_tokens_per_s": num_trained / timing["timing/training_s"],
        }
        if not (ahead and self._config.grpo.async_grpo.order == "finished"):
            generation_s = timing[f"timing/{ahead}generation_s"]
            found["generation_tokens_per_s"] = sum(map(num_sampled, rollouts)) / generation_s
        if self._config.grpo.use_dynamic_sampling:
            found |= self._about_dynamic_sampling(rollouts, trained)
        if (collecting := self._config.grpo.async_grpo) is not None and collecting.enabled:
            found["avg_trajectory_age"] = min(self._num_steps, collecting.max_trajectory_age_steps)
            found["buffer_size"] = timing["train/buffer_size"]  # whatever had ended by then
            ages = [
                self._num_steps - version
                for rollout in trained
                for each in (rollout, *rollout["other_conversations"])
                for version, count in each["weight_versions"]
                for _ in range(count)
            ]
            found |= {"avg_token_age": fmean(ages), "max_token_age": max(ages)}
        self._num_steps += 1
        return found | self._train(trained)

    def _about_dynamic_sampling(self, rollouts: Sequence[Rollout], trained: Sequence[Rollout]) -> Metrics:
        grpo, size = self._config.grpo, self._config.grpo.num_generations_per_prompt
        return {
            "dynamic_sampling_batches": len(rollouts) / size / int(grpo.num_prompts_per_step * grpo.batch_multiplier),
            "dynamic_sampling_constant_groups": sum(
                len({r["reward"] for r in scored(group)}) < 2 for group in groups(rollouts)
            ),
            "filtered_reward_mean": fmean(rollout["reward"] for rollout in scored(trained)),
            "filtered_accuracy": fmean(rollout["correct"] for rollout in scored(trained)),
        }

    def _train(self, rollouts: Sequence[Rollout]) -> Metrics:
        size = self._config.policy.train_global_batch_size
        assert len(rollouts) % size == 0
        prev, reference = (
            [response_logprobs(model, rollout).detach() for rollout in rollouts]
            for model in (self._model, self._reference)
        )
        for rollout, ours, frozen in zip(rollouts, prev, reference, strict=True):
            sampled = torch.tensor(rollout["token_mask"]) == 1
            if not rollout["trained"]:
                assert rollout["prev_logprobs"] is rollout["reference_logprobs"] is None
                continue
            for name, values in (("prev_logprobs", ours), ("reference_logprobs", frozen)):
                torch.testing.assert_close(torch.tensor(rollout[name])[sampled], values[sampled], rtol=1e-3, atol=1e-4)
        agreement = self._agreement(rollouts, prev)
        advantages = self._advantages(rollouts, prev, reference)
        updates = [
            self._update(
                [rollouts[row] for row in rows],
                [prev[row] for row in rows],
                [reference[row] for row in rows],
                [advantages[row] for row in rows],
            )
            for rows in batched(range(len(rollouts)), size)
        ]
        if self._schedule is not None:
            self._schedule.step()
        reduce = {"probs_ratio_min": min, "probs_ratio_max": max, "learning_rate": lambda values: list(values)[-1]}
        found: Metrics = {name: reduce.get(name, fmean)([update[name] for update in updates]) for name in updates[0]}
        skipped = sum(not math.isfinite(update["grad_norm"]) for update in updates)
        return found | agreement | {"skipped_updates": skipped, "oom_splits": 0}

    def _agreement(self, rollouts: Sequence[Rollout], prev: Sequence[Tensor]) -> Metrics:
        """Errors of whole responses, and that those above the threshold were not trained on."""
        grpo = self._config.grpo
        limit, errors, num_masked = grpo.seq_logprob_error_threshold, [], 0
        for rollout, ours in zip(rollouts, prev, strict=True):
            is_cut = grpo.overlong_filtering and rollout["truncated"]
            if rollout["prompt_is_overlong"] or rollout["unscored"] or is_cut:
                assert not rollout["trained"]
                continue
            sampled = torch.tensor(rollout["token_mask"]) == 1
            engine = torch.tensor(rollout["generation_logprobs"])
            errors.append((engine - ours).abs().exp()[sampled].mean().item())
            is_masked = limit is not None and errors[-1] > limit
            assert rollout["trained"] != is_masked
            num_masked += is_masked
        found: Metrics = {"mean_seq_mult_prob_error": fmean(errors), "max_seq_mult_prob_error": max(errors)}
        return found if limit is None else found | {"num_masked_seqs_by_logprob_error": num_masked}

    def _advantages(
        self, rollouts: Sequence[Rollout], prev: Sequence[Tensor], reference: Sequence[Tensor]
    ) -> list[Tensor]:
        """Of each token after the prompt, by the estimator's formula; their means are what was dumped."""
        grpo, loss = self._config.grpo, self._config.loss_fn
        found = []
        if grpo.adv_estimator.name == "grpo":
            for group in groups(rollouts):
                for rollout in group:
                    if rollout["unscored"]:
                        found.append(torch.zeros(len(rollout["token_ids"]), dtype=torch.float64))
                        continue
                    everyone = scored(group)
                    others = [r["shaped_reward"] for r in everyone if r is not rollout]
                    compared = others if grpo.use_leave_one_out_baseline else [r["shaped_reward"] for r in everyone]
                    deviation = stdev(compared) if grpo.normalize_rewards and len(set(compared)) > 1 else 1.0
                    value = (rollout["shaped_reward"] - fmean(compared)) / deviation
                    found.append(torch.full((len(rollout["token_ids"]),), value, dtype=torch.float64))
        else:
            means = [fmean(r["shaped_reward"] for r in scored(group)) for group in groups(rollouts) for _ in group]
            for rollout, mean, ours, frozen in zip(rollouts, means, prev, reference, strict=True):
                value = (rollout["shaped_reward"] or 0.0) - (mean if grpo.adv_estimator.minus_baseline else 0.0)
                log_r = (frozen - ours).double() * rollout["trained"]
                kl = {"k1": -log_r, "k2": log_r.square() / 2}[loss.reference_policy_kl_type]
                weight = loss.reference_policy_kl_penalty if loss.use_kl_in_reward else 0.0
                found.append(value - weight * kl)
            counted = torch.cat(
                [
                    values[(torch.tensor(rollout["token_mask"]) == 1) & rollout["trained"]]
                    for rollout, values in zip(rollouts, found, strict=True)
                ]
            )
            found = [(values - counted.mean()) / counted.std(correction=0).clamp(min=1e-4) for values in found]
        low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
        found = [values.clamp(-math.inf if low is None else low, high) for values in found]
        for rollout, values in zip(rollouts, found, strict=True):
            mean = values[torch.tensor(rollout["token_mask"]) == 1].mean().item()
            assert (rollout["advantage"] is None) == bool(rollout["unscored"])
            assert rollout["unscored"] or math.isclose(rollout["advantage"], mean, rel_tol=1e-3, abs_tol=1e-4), (
                rollout["advantage"],
                mean,
            )
        return found

    def _update(
        self,
        rollouts: Sequence[Rollout],
        prev: Sequence[Tensor],
        reference: Sequence[Tensor],
        advantages: Sequence[Tensor],
    ) -> Metrics:
        loss = self._config.loss_fn
        assert not loss.sequence_level_importance_ratios and not loss.force_on_policy_ratio
        assert loss.use_kl_in_reward or loss.reference_policy_kl_type == "k3+"
        assert not loss.use_on_policy_kl_approximation
        counted = [torch.tensor(rollout["token_mask"]).bool() for rollout in rollouts]
        counted = [mask & rollout["trained"] for mask, rollout in zip(counted, rollouts, strict=True)]

        def flat(values: Sequence[Tensor]) -> Tensor:
            return torch.cat([value[mask] for value, mask in zip(values, counted, strict=True)])

        now = flat([response_logprobs(self._model, rollout) for rollout in rollouts])
        with torch.no_grad():
            entropy = flat([response_entropy(self._model, rollout) for rollout in rollouts])
        old, frozen = flat(prev).double(), flat(reference).double()
        engine = flat([torch.tensor(rollout["generation_logprobs"], dtype=torch.float64) for rollout in rollouts])
        advantage = flat(advantages)
        lengths = [int(mask.sum()) for mask in counted]
        num_trained = sum(length > 0 for length in lengths)
        divisors = [loss.constant_length_divisor or length for length in lengths]
        # What each token's term counts in the loss.
        share = torch.cat(
            [
                torch.full((length,), 1 / sum(lengths) if loss.token_level_loss else 1 / max(divisor, 1) / num_trained)
                for length, divisor in zip(lengths, divisors, strict=True)
            ]
        )

        ratio = (now - old).exp()
        clipped_ratio = ratio.clamp(1 - loss.ratio_clip_min, 1 + loss.ratio_clip_max)
        # PPO takes the smaller of two objectives; the dual clip bounds what a negative advantage can cost.
        objective = torch.minimum(advantage * ratio, advantage * clipped_ratio)
        is_bounded = torch.zeros_like(ratio, dtype=torch.bool)
        if loss.ratio_clip_c is not None:
            is_bounded = (advantage < 0) & (objective < advantage * loss.ratio_clip_c)
            objective = torch.where(is_bounded, advantage * loss.ratio_clip_c, objective)
        is_clipped = advantage * clipped_ratio < advantage * ratio
        if loss.use_cispo:
            objective, is_clipped = advantage * clipped_ratio.detach() * now, clipped_ratio != ratio
        if loss.disable_ppo_ratio:
            objective, is_clipped = advantage * now, torch.zeros_like(is_bounded)
        log_weight, limit = old - engine, loss.truncated_importance_sampling_ratio
        least, kind = loss.truncated_importance_sampling_ratio_min or 0.0, loss.truncated_importance_sampling_type
        weight, is_out = log_weight.exp(), torch.zeros_like(is_bounded)
        by_response = [weights.mean() for weights in log_weight.split(lengths)]
        means = torch.cat([mean.exp().expand(n) for mean, n in zip(by_response, lengths, strict=True)])
        applied = weight
        if limit is not None:
            judged = means if kind == "seq-mask-tis" else weight
            is_out = (judged < least) | (judged > limit)
            applied = weight.clamp(least, limit) if kind in (None, "tis") else weight * ~is_out
        actor = -(objective * (applied if loss.use_importance_sampling_correction else 1.0) * share).sum()
        log_r = frozen - now
        clamp = loss.kl_output_clamp_value
        values = {"k1": -log_r, "k2": log_r.square() / 2, "k3": log_r.exp() - 1 - log_r}
        kl = (values[loss.reference_policy_kl_type.removesuffix("+")].clamp(-clamp, clamp) * share).sum()
        penalty = 0.0 if loss.use_kl_in_reward else loss.reference_policy_kl_penalty
        # The penalty's gradient is that of the KL, which is the gradient of half the square.
        (actor + penalty * (log_r.square() / 2 * share).sum()).backward()

        grad_norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._config.policy.max_grad_norm or math.inf
        )
        found = {
            "loss": actor + penalty * kl,
            "actor_loss": actor,
            "kl": kl,
            "probs_ratio": ratio.mean(),
            "probs_ratio_min": ratio.min(),
            "probs_ratio_max": ratio.max(),
            "clip_fraction": is_clipped.double().mean(),
            "dual_clip_fraction": is_bounded.double().mean(),
            "outside_nucleus_rate": 0.0,  # runs here draw from the whole vocabulary
            "sampling_importance_ratio": applied.mean(),
            "token_mult_prob_error": (old - engine).abs().exp().mean(),
            "gen_kl_error": ((old - engine).exp() - 1 - (old - engine)).mean(),
            "entropy": entropy.mean(),
            "approx_entropy": -((now - engine).exp() * now).mean(),
            "grad_norm": grad_norm,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
        }
        if limit is not None:
            of_tokens = kind != "seq-mask-tis"
            outs = is_out if of_tokens else torch.stack([out[0] for out in is_out.split(lengths) if len(out)])
            found["is_oob_ratio"] = outs.double().mean()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {name: float(torch.as_tensor(value).detach()) for name, value in found.items()}


def response_logprobs(model: Any, rollout: Rollout) -> Tensor:
    """Of each token after the prompt, by a whole log-softmax."""
    logprobs = response_logits(model, rollout).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(rollout["token_ids"])[:, None])[:, 0]


def response_entropy(model: Any, rollout: Rollout) -> Tensor:
    """Of the model's choice at each token after the prompt."""
    return torch.distributions.Categorical(logits=response_logits(model, rollout)).entropy()


def response_logits(model: Any, rollout: Rollout) -> Tensor:
    """Those that each token after the prompt was chosen by."""
    ids = torch.tensor([*rollout["prompt_token_ids"], *rollout["token_ids"]])
    return model(input_ids=ids[None]).logits[0, len(rollout["prompt_token_ids"]) - 1 : -1]


def groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each prompt."""
    return [
        [rollout for rollout in rollouts if rollout["group"] == group]
        for group in dict.fromkeys(rollout["group"] for rollout in rollouts)
    ]


def scored(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those that have a score."""
    return [rollout for rollout in rollouts if not rollout["unscored"]]


def num_sampled(rollout: Rollout) -> int:
    """Tokens of the policy."""
    return sum(rollout["token_mask"])


def spread(name: str, values: Sequence[float]) -> Metrics:
    """Mean, deviation and extremes."""
    return {
        f"{name}_mean": fmean(values), f"{name}_std": stdev(values), f"{name}_min": min(values),
        f"{name}_max": max(values),
    }  # fmt: skip


def pass_at(group: Sequence[Rollout], k: int) -> float:
    """The share of choices of k responses with a right one."""
    return fmean(any(rollout["correct"] for rollout in some) for some in combinations(group, k))


def about_rollouts(rollouts: Sequence[Rollout], group_size: int) -> Metrics:
    """What is said of what was sampled, trained on or not."""
    lengths, prompts = [num_sampled(rollout) for rollout in rollouts], [len(r["prompt_token_ids"]) for r in rollouts]
    by_group = groups(rollouts)
    assert {len(group) for group in by_group} == {group_size}
    judged, by_group = scored(rollouts), [scored(group) for group in by_group if scored(group)]
    reasons = [rollout["unscored"] for rollout in rollouts]
    found = spread("reward", [rollout["reward"] for rollout in judged]) | {
        "accuracy": fmean(rollout["correct"] for rollout in judged),
        "pass_rate": fmean(any(rollout["correct"] for rollout in group) for group in by_group),
        "constant_group_rate": fmean(len({rollout["reward"] for rollout in group}) == 1 for group in by_group),
        **{f"{reason}_rate": reasons.count(reason) / len(reasons) for reason in ("failed", "timed_out", "no_reward")},
        "overlong_prompt_rate": fmean(rollout["prompt_is_overlong"] for rollout in rollouts),
        "mean_prompt_tokens": fmean(prompts),
        "max_prompt_tokens": max(prompts),
        "mean_response_tokens": fmean(lengths),
        "max_response_tokens": max(lengths),
        "mean_turns": fmean(rollout["num_turns"] for rollout in rollouts),
        "truncation_rate": fmean(rollout["truncated"] for rollout in rollouts),
    }
    for k in (2, 4, 8, 16):
        if chances := [pass_at(group, k) for group in by_group if len(group) >= k]:
            found[f"pass_at_{k}"] = fmean(chances)
    names = sorted({rollout["data_set"] for rollout in rollouts})
    for name in names if len(names) > 1 else ():
        of_set = [rollout for rollout in judged if rollout["data_set"] == name]
        found[f"reward_mean/{name}"] = fmean(rollout["reward"] for rollout in of_set)
        found[f"accuracy/{name}"] = fmean(rollout["correct"] for rollout in of_set)
    return found
