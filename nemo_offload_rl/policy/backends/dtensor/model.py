"""Loading a Hugging Face causal model, and the module that FSDP wraps: token ids in, token logprobs out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.policy.backends.dtensor.packed_attention import PACKED_ATTENTION, register_packed_attention
from nemo_offload_rl.policy.backends.logprobs import VocabShard, chunked_logprobs

PREFIX = "causal_lm."


def load_causal_lm(model_name: str, config: Any, *, packed_attention: bool = False) -> Any:
    """The model with fp32 weights on the CPU.

    Args:
        model_name: Folder or hub name.
        config: What `load_config` gave.
        packed_attention: Attend by `packed_attention.py`, for packed rows on a GPU in half precision.

    Raises:
        UserError: The weights cannot be read, or some are missing.
    """
    transformers_logging.disable_progress_bar()
    if packed_attention:
        register_packed_attention()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_name,
            config=config,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION if packed_attention else "sdpa",
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


def compile_layers(layers: nn.ModuleList) -> None:
    """Have each layer's `forward` compiled at its first call; hooks of FSDP and checkpointing stay outside of it."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


class LogprobModel(nn.Module):
    """Token logprobs of a Hugging Face causal model; logits exist only inside `forward`, and only for scored tokens.

    No attention mask is passed: rows are padded on the right, so the causal mask keeps padding away from real tokens.
    With `pack`, the rows become one row without padding. Where attention must not reach across, Hugging Face's models
    see from positions that begin again at 0, and `packed_attention.py` from the sequences' bounds.
    """

    def __init__(
        self, causal_lm: Any, *, temperature: float, chunk_size: int | None, shard: VocabShard, pack: bool = False
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._pack = pack
        self._how = {"temperature": temperature, "chunk_size": chunk_size, "shard": shard}

    def forward(self, input_ids_BS: Tensor, input_lengths_B: Tensor, scored_N: Tensor) -> Tensor:
        """[B, S] float32 logprobs by the package's convention; 0 where none is wanted.

        Args:
            input_ids_BS: [B, S] int64.
            input_lengths_B: [B] int64.
            scored_N: [N] int64 places in the flattened rows, the tokens to score: real, and never a row's first.
        """
        if self._pack:
            hidden_TH, place_N = self._packed(input_ids_BS, input_lengths_B, scored_N)
        else:
            hidden_BSH = self.causal_lm.model(input_ids=input_ids_BS, use_cache=False).last_hidden_state
            hidden_TH, place_N = hidden_BSH.flatten(0, 1), scored_N
        before_NH = hidden_TH.index_select(0, place_N - 1)
        targets_N = input_ids_BS.flatten().index_select(0, scored_N)
        found_N = chunked_logprobs(self.causal_lm.lm_head, before_NH, targets_N, **self._how)
        logprobs = torch.zeros(input_ids_BS.numel(), dtype=found_N.dtype, device=found_N.device)
        return logprobs.index_copy(0, scored_N, found_N).view_as(input_ids_BS)

    def _packed(self, input_ids_BS: Tensor, input_lengths_B: Tensor, scored_N: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] hidden states of one row of all real tokens (T of them), and the scored ones' places in that row."""
        position_BS = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device).expand_as(input_ids_BS)
        is_real_BS = position_BS < input_lengths_B.unsqueeze(1)
        ids_1T, position_1T = input_ids_BS[is_real_BS].unsqueeze(0), position_BS[is_real_BS].unsqueeze(0)
        hidden_1TH = self.causal_lm.model(
            input_ids=ids_1T, position_ids=position_1T, use_cache=False, **self._bounds(input_lengths_B)
        ).last_hidden_state
        place_BS = is_real_BS.flatten().cumsum(0) - 1
        return hidden_1TH.squeeze(0), place_BS.index_select(0, scored_N)

    def _bounds(self, input_lengths_B: Tensor) -> dict[str, Any]:
        """What `packed_attention` is told about the row."""
        if self.causal_lm.config._attn_implementation != PACKED_ATTENTION:
            return {}
        bounds = F.pad(input_lengths_B.cumsum(0, dtype=torch.int32), (1, 0))
        longest = int(input_lengths_B.max())
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}

    def hf_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names; a tied one once, under its first name."""
        return [(name.removeprefix(PREFIX), parameter) for name, parameter in self.named_parameters()]
