"""The module that FSDP wraps: token ids in, logprobs or whatever else a `Reader` reads out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_offload_rl.policy.backends.dtensor.attention import PACKED
from nemo_offload_rl.policy.backends.readers import Head, Positions, Reader, capped

PREFIX = "causal_lm."


def decoder_layers(causal_lm: Any) -> nn.ModuleList:
    """The layers of a Hugging Face causal model, which it names as what is not divided over devices."""
    names = set(causal_lm._no_split_modules)
    (layers,) = (
        module
        for module in causal_lm.base_model.children()
        if isinstance(module, nn.ModuleList) and {type(layer).__name__ for layer in module} <= names
    )
    return layers


def compile_layers(layers: nn.ModuleList) -> None:
    """Have each layer's `forward` compiled at its first call, for all sizes of batches at once.

    Compiled for the first size only, it would be compiled again at the first other one, which may be hours later: the
    fifth step of a run whose longest responses had been of one length took 14 s instead of 0.6. Hooks of FSDP and
    checkpointing stay outside of it.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


@dataclass(frozen=True)
class PackedRow:
    """The real tokens of a batch's rows, T of them, end to end in one row.

    Attributes:
        tokens_T: Their places in the flattened rows.
        positions_T: The position of each in its own row.
        places_N: Where in the packed row the tokens to score are.
        bounds: [B + 1] int32; where each of the rows begins, and T.
        longest: Tokens of the longest of them.
    """

    tokens_T: Tensor
    positions_T: Tensor
    places_N: Tensor
    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, lengths_B: Tensor, width: int, scored_N: Tensor, device: torch.device) -> PackedRow:
        """Put rows end to end.

        Args:
            lengths_B: [B] tokens of each row, on the host: looking at them on a GPU waits for all that is queued there.
            width: S, columns of the padded rows.
            scored_N: [N] places in the flattened rows, the tokens to score; on the host too.
            device: Where the result goes.
        """
        is_real_BS = torch.arange(width) < lengths_B.unsqueeze(1)
        tokens_T = is_real_BS.flatten().nonzero().squeeze(1)
        place_BS = is_real_BS.flatten().cumsum(0) - 1

        def move(value: Tensor) -> Tensor:
            return value.to(device, non_blocking=True)

        return cls(
            tokens_T=move(tokens_T),
            positions_T=move(tokens_T % width),
            places_N=move(place_BS.index_select(0, scored_N)),
            bounds=move(F.pad(lengths_B.cumsum(0, dtype=torch.int32), (1, 0))),
            longest=int(lengths_B.max()),
        )


class LogprobModel(nn.Module):
    """What a `Reader` makes of a Hugging Face causal model; logits exist only inside `forward`, for scored tokens.

    No attention mask is passed: rows are padded on the right, so the causal mask keeps padding away from real tokens.
    Where attention must not reach across a packed row, Hugging Face's models see from positions that begin again at 0,
    and `attention.py` from the sequences' bounds.
    """

    def __init__(self, causal_lm: Any, head: Head) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._head = head

    def _logits(self, hidden: Tensor) -> Tensor:
        """This rank's vocabulary columns, in the shape of `hidden`."""
        return capped(self.causal_lm.get_output_embeddings()(hidden), self._head.softcap)

    def forward(self, input_ids_BS: Tensor, scored_N: Tensor, row: PackedRow | None, reader: Reader) -> Any:
        """What the reader gives, with [B, S, ...] tensors by the package's convention of logprobs; 0 elsewhere.

        Args:
            input_ids_BS: [B, S] int64.
            scored_N: [N] int64 places in the flattened rows, the tokens to score: real, and never a row's first.
            row: The real tokens as one row, which the model gets instead; None for the padded rows.
            reader: What to make of the hidden states before the scored tokens.
        """
        if row is None:
            hidden_BSH = self.causal_lm.base_model(input_ids=input_ids_BS, use_cache=False).last_hidden_state
            hidden_TH, place_N = hidden_BSH.flatten(0, 1), scored_N
        else:
            hidden_TH, place_N = self._of_row(input_ids_BS, row), row.places_N
        before_NH = hidden_TH.index_select(0, place_N - 1)
        targets_N = input_ids_BS.flatten().index_select(0, scored_N)
        positions = Positions(before_NH, targets_N, scored_N)
        found = reader(self._logits, positions, self._head)

        def at_their_places(found_N: Tensor | None) -> Tensor | None:
            if found_N is None:
                return None
            whole = found_N.new_zeros(input_ids_BS.numel(), *found_N.shape[1:]).index_copy(0, scored_N, found_N)
            return whole.unflatten(0, input_ids_BS.shape)

        return type(found)(*map(at_their_places, found))

    def _of_row(self, input_ids_BS: Tensor, row: PackedRow) -> Tensor:
        """[T, H] hidden states."""
        bounds = {}
        if self.causal_lm.config._attn_implementation == PACKED:
            bounds = {"cu_seq_lens_q": row.bounds, "cu_seq_lens_k": row.bounds}
            bounds |= {"max_length_q": row.longest, "max_length_k": row.longest}
        hidden_1TH = self.causal_lm.base_model(
            input_ids=input_ids_BS.flatten().index_select(0, row.tokens_T).unsqueeze(0),
            position_ids=row.positions_T.unsqueeze(0),
            use_cache=False,
            **bounds,
        ).last_hidden_state
        return hidden_1TH.squeeze(0)

    def hf_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names; a tied one once, under its first name."""
        return [(name.removeprefix(PREFIX), parameter) for name, parameter in self.named_parameters()]
