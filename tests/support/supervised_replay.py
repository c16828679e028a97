"""What SFT and DPO runs of `supervised_cases.py` report, computed again by plain code: Hugging Face's model, torch's
optimizer, and every metric of docs/reference/metrics.md as its formula."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from tiny_models import make_qwen3, make_tokenizer
from torch import Tensor

type Metrics = dict[str, float]

BETA = 0.05  # dpo.reference_policy_kl_penalty of the exemplar
LEARNING_RATE = 1e-3


class Row:
    """A prompt and one response, as the cases' chat template and tokenizer make them."""

    def __init__(self, prompt: Sequence[Any], response: Sequence[Any]) -> None:
        tokenizer = make_tokenizer()
        self.prompt_ids = tokenizer.encode(prompt[0]["content"] + ">", add_special_tokens=False)
        said = tokenizer.encode(response[0]["content"], add_special_tokens=False)
        self.response_ids = [*said, tokenizer.eos_token_id]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def logprobs(self, model: Any) -> Tensor:
        """Of each token of the response and of its end, by a whole log-softmax."""
        return self._logits(model).log_softmax(-1).gather(1, torch.tensor(self.response_ids)[:, None])[:, 0]

    def is_predicted(self, model: Any) -> list[bool]:
        """Of the same tokens, whether the model would have chosen them."""
        return (self._logits(model).argmax(-1) == torch.tensor(self.response_ids)).tolist()

    def _logits(self, model: Any) -> Tensor:
        ids = torch.tensor([*self.prompt_ids, *self.response_ids])
        return model(input_ids=ids[None]).logits[0, len(self.prompt_ids) - 1 : -1]


class SftReplay:
    """The steps of a run, one after the other."""

    def __init__(self) -> None:
        self._model = make_qwen3(0)
        self._reference = copy.deepcopy(self._model).requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-5
        )
        self._total_tokens = 0

    def step(self, pairs: Sequence[Any], training_s: float) -> Metrics:
        """Every metric under `train/` of the next step, which took `training_s` seconds of training."""
        rows = self._rows(pairs)
        about_loss, loss = self._about_loss(pairs)
        self._optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        self._optimizer.step()
        num_tokens = sum(map(len, rows))
        self._total_tokens += num_tokens
        return {
            **about_loss,
            **self._sizes(rows, len(pairs), training_s),
            "grad_norm": float(torch.cat([gradient.flatten() for gradient in gradients]).double().norm()),
            "learning_rate": LEARNING_RATE,
            "skipped_updates": 0.0,
            "oom_splits": 0.0,
            "num_tokens": num_tokens,
            "total_tokens": self._total_tokens,
            "max_sequence_tokens": max(map(len, rows)),
            "training_tokens_per_s": num_tokens / training_s,
        }

    @torch.no_grad()
    def validation(self, pairs: Sequence[Any]) -> Metrics:
        """Every metric under `validation/`, with the present weights."""
        found = self._about_loss(pairs)[0]
        return {**found, "perplexity": math.exp(found["loss"])}

    def _rows(self, pairs: Sequence[Any]) -> list[Row]:
        return [Row(pair.prompt, pair.chosen) for pair in pairs]

    def _sizes(self, rows: Sequence[Row], num_pairs: int, training_s: float) -> Metrics:
        return {"num_counted_tokens": sum(len(row.response_ids) for row in rows), "overlong_row_rate": 0.0}

    def _about_loss(self, pairs: Sequence[Any]) -> tuple[Metrics, Tensor]:
        loss = -torch.cat([row.logprobs(self._model) for row in self._rows(pairs)]).mean()
        is_predicted = [is_one for row in self._rows(pairs) for is_one in row.is_predicted(self._model)]
        return {"loss": loss.item(), "token_accuracy": fmean(is_predicted)}, loss


class DpoReplay(SftReplay):
    """The same of DPO; the reference is the model before the first step."""

    @torch.no_grad()
    def validation(self, pairs: Sequence[Any]) -> Metrics:
        return self._about_loss(pairs)[0]

    def _rows(self, pairs: Sequence[Any]) -> list[Row]:
        return [Row(pair.prompt, response) for pair in pairs for response in (pair.chosen, pair.rejected)]

    def _sizes(self, rows: Sequence[Row], num_pairs: int, training_s: float) -> Metrics:
        return {"training_pairs_per_s": num_pairs / training_s, "overlong_row_rate": 0.0}

    def _about_loss(self, pairs: Sequence[Any]) -> tuple[Metrics, Tensor]:
        rows = self._rows(pairs)
        sums = torch.stack([row.logprobs(self._model).sum() for row in rows]).double()
        frozen = torch.stack([row.logprobs(self._reference).sum() for row in rows]).double()
        rewards = BETA * (sums - frozen)
        chosen, rejected = rewards[::2], rewards[1::2]
        loss = -F.logsigmoid(chosen - rejected).mean()
        found = {
            "loss": loss.item(),
            "preference_loss": loss.item(),
            "sft_loss": -sums[::2].mean().item(),
            "accuracy": fmean((chosen > rejected).tolist()),
            "rewards_chosen_mean": chosen.mean().item(),
            "rewards_rejected_mean": rejected.mean().item(),
            "rewards_margin_mean": (chosen - rejected).mean().item(),
            "logps_chosen_mean": sums[::2].mean().item(),
            "logps_rejected_mean": sums[1::2].mean().item(),
        }
        return found, loss
