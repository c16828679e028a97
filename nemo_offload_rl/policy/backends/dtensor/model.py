"""Loading a Hugging Face causal model, and the module that FSDP wraps: token ids in, token logprobs out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.policy.backends.dtensor.logprobs import VocabShard, sequence_logprobs

PREFIX = "causal_lm."


def load_config(model_name: str, overrides: Mapping[str, Any]) -> Any:
    """The model's Hugging Face config with `policy.hf_config_overrides` applied.

    Raises:
        UserError: The config cannot be read, or an override names no key of it.
    """
    try:
        config = AutoConfig.from_pretrained(model_name)
    except (OSError, ValueError) as error:
        raise UserError(f"The config of policy.model_name={model_name} cannot be read: {error}") from error
    known = config.to_dict()
    for key, value in overrides.items():
        if key not in known:
            raise UserError(f"policy.hf_config_overrides.{key} is no key of the config of {model_name}; remove it.")
        setattr(config, key, value)
    return config


def load_causal_lm(model_name: str, config: Any) -> Any:
    """The model with fp32 weights on the CPU.

    Raises:
        UserError: The weights cannot be read, or some are missing.
    """
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_name,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, in one line
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"The weights of policy.model_name={model_name} cannot be read: {error}") from error
    model, info = loaded
    wrong = sorted(info["missing_keys"]) or sorted(str(key[0]) for key in info["mismatched_keys"])
    if wrong:
        raise UserError(
            f"The weights of {model_name} lack or misshape {len(wrong)} tensors that its config asks for, first "
            f"{wrong[0]}; the folder is incomplete or belongs to another config."
        )
    # A padding row without gradient would depend on how the vocabulary is split; padding gets no gradient anyway.
    model.model.embed_tokens.padding_idx = None
    return model


class LogprobModel(nn.Module):
    """Token logprobs of a Hugging Face causal model; logits exist only inside `forward`.

    No attention mask is passed: rows are padded on the right, so the causal mask keeps padding away from real tokens.
    """

    def __init__(self, causal_lm: Any, *, temperature: float, chunk_size: int | None, shard: VocabShard) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._score = {"temperature": temperature, "chunk_size": chunk_size, "shard": shard}

    def forward(self, input_ids_BS: Tensor, input_lengths_B: Tensor) -> Tensor:
        """[B, S] float32 logprobs by the package's convention; 0 on padding."""
        hidden_BSH = self.causal_lm.model(input_ids=input_ids_BS, use_cache=False).last_hidden_state
        return sequence_logprobs(self.causal_lm.lm_head, hidden_BSH, input_ids_BS, input_lengths_B, **self._score)

    def hf_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names; a tied one once, under its first name."""
        return [(name.removeprefix(PREFIX), parameter) for name, parameter in self.named_parameters()]
