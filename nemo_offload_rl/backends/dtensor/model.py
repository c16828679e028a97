"""The module that FSDP wraps: token ids and the model's rows in, logprobs or other results of a `Reader` out.

`ModelRows` has the indices that map a micro-batch's tokens, and the tokens to score, to the model's rows. They are
computed on the host: reading lengths from a GPU would wait for all queued work.

Shape suffixes: B rows of S columns of the micro-batch; R rows of L tokens of the model's input, T in all; N scored
tokens; D decoder layers; K experts per token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_offload_rl.backends.dtensor.attention import TAKES_BOUNDS, own_pieces
from nemo_offload_rl.backends.dtensor.experts import expert_modules
from nemo_offload_rl.backends.dtensor.replayed_experts import ReplayedExperts
from nemo_offload_rl.backends.dtensor.state_mixers import has_states, sequence_arguments
from nemo_offload_rl.backends.ranks import sum_over
from nemo_offload_rl.data.batch import on_device
from nemo_offload_rl.protocols.scoring import Head, Positions, Reader, capped
from nemo_offload_rl.utils.liveness import show_progress

PREFIX = "causal_lm."
_MOST_COMPILATIONS = 64


@dataclass(frozen=True)
class ModelRows:
    """The model's rows for a micro-batch.

    Attributes:
        scored_N: Indices of the tokens to score in the flattened rows of the micro-batch.
        before_N: Indices of the tokens before them in the flattened rows of the model.
        tokens_RL: Indices of the model's tokens in the flattened rows of the micro-batch; None if the model gets the
            micro-batch's rows unchanged.
        positions_RL: Positions of the model's tokens, [1, L] if equal in all rows; None for column numbers.
        bounds: [sequences + 1] int32, with packed rows: the start of each sequence, and L.
        lengths: Tokens of each packed sequence, on the host.
        experts_TDK: Routing of the model's tokens; None if the model chooses all experts.
    """

    scored_N: Tensor
    before_N: Tensor
    tokens_RL: Tensor | None = None
    positions_RL: Tensor | None = None
    bounds: Tensor | None = None
    lengths: tuple[int, ...] = ()
    experts_TDK: Tensor | None = None

    def replaying(self, experts_BSDK: Tensor | None) -> Self:
        """Return a copy with the routing of a micro-batch; both are on one device."""
        if experts_BSDK is None:
            return self
        experts_TDK = experts_BSDK.flatten(0, 1)
        if self.tokens_RL is not None:
            experts_TDK = experts_TDK.index_select(0, self.tokens_RL.flatten())
        return replace(self, experts_TDK=experts_TDK)

    def to(self, device: torch.device) -> Self:
        """Return a copy on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **{name: on_device(value, device) for name, value in tensors.items()})


def padded_rows(is_scored_BS: Tensor, multiple: int) -> ModelRows:
    """Lay out rows that are padded on the right.

    Args:
        is_scored_BS: [B, S] bool, tokens to score: real, and never a row's first.
        multiple: Divisor of L; columns beyond S have any token.
    """
    (num_rows, width), scored_N = is_scored_BS.shape, _places(is_scored_BS)
    added = -width % multiple
    if not added:
        return ModelRows(scored_N, scored_N - 1)
    column_L = torch.arange(width + added).clamp(max=width - 1)
    tokens_BL = torch.arange(num_rows).unsqueeze(1) * width + column_L
    return ModelRows(scored_N, scored_N + scored_N // width * added - 1, tokens_BL)


def shared_rows(is_scored_BS: Tensor, multiple: int, rank: int, num_ranks: int) -> ModelRows:
    """Lay out one rank's part of rows that are padded on the right and shared by ranks.

    A rank scores the tokens whose preceding token it has.

    Args:
        is_scored_BS: [B, S] bool, tokens to score: real, and never a row's first.
        multiple: Divisor of the length of a rank's pieces; columns beyond S have any token.
        rank: This rank among those that share the rows.
        num_ranks: Number of ranks that share the rows.
    """
    width, scored_N = is_scored_BS.shape[1], _places(is_scored_BS)
    length = -(-width // (2 * num_ranks))
    length += -length % multiple
    pieces = [torch.arange(index * length, (index + 1) * length) for index in own_pieces(rank, num_ranks)]
    column_L = torch.cat(pieces)
    place_P = torch.full((2 * num_ranks * length,), -1).index_copy(0, column_L, torch.arange(len(column_L)))
    before_N = scored_N - 1
    row_N, place_N = before_N // width, place_P.index_select(0, before_N % width)
    is_mine_N = place_N >= 0
    column_L = column_L.clamp(max=width - 1)
    return ModelRows(
        scored_N[is_mine_N],
        (row_N * len(column_L) + place_N)[is_mine_N],
        tokens_RL=torch.arange(len(is_scored_BS)).unsqueeze(1) * width + column_L,
        positions_RL=column_L.unsqueeze(0),
    )


def packed_rows(lengths_B: Tensor, is_scored_BS: Tensor, multiple: int) -> ModelRows:
    """Lay out the real tokens of a micro-batch's rows end to end in one row.

    Args:
        lengths_B: [B] tokens of each row.
        is_scored_BS: [B, S] bool, tokens to score: real, and never a row's first.
        multiple: Divisor of L; added tokens are a sequence of their own.
    """
    width, scored_N = is_scored_BS.shape[1], _places(is_scored_BS)
    is_real_BS = torch.arange(width) < lengths_B.unsqueeze(1)
    tokens_L = _places(is_real_BS)
    place_BS = is_real_BS.flatten().cumsum(0) - 1
    added = -len(tokens_L) % multiple
    if added:
        lengths_B = torch.cat([lengths_B, lengths_B.new_tensor([added])])
    return ModelRows(
        scored_N,
        place_BS.index_select(0, scored_N) - 1,
        tokens_RL=F.pad(tokens_L, (0, added)).unsqueeze(0),
        positions_RL=torch.cat([tokens_L % width, torch.arange(added)]).unsqueeze(0),
        bounds=F.pad(lengths_B.cumsum(0, dtype=torch.int32), (1, 0)),
        lengths=tuple(lengths_B.tolist()),
    )


def _places(is_wanted_BS: Tensor) -> Tensor:
    return is_wanted_BS.flatten().nonzero().squeeze(1)


def decoder_layers(causal_lm: Any) -> nn.ModuleList:
    """Return the decoder layers of a Hugging Face causal model, found by the classes in its `_no_split_modules`."""
    names = set(causal_lm._no_split_modules)
    (layers,) = (
        module
        for module in causal_lm.base_model.children()
        if isinstance(module, nn.ModuleList) and {type(layer).__name__ for layer in module} <= names
    )
    return layers


def can_be_compiled(causal_lm: nn.Module) -> bool:
    """Tell whether `torch_compile` compiles a model's layers; those with experts or states are left as they are."""
    return not expert_modules(causal_lm) and not has_states(causal_lm)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer's `forward` at its first call, for all batch sizes at once.

    A layer compiled for the first size alone is compiled again at the next one, which may come hours later: in one run
    the fifth step then took 14 s instead of 0.6 s. Hooks of FSDP and checkpointing are not compiled.

    All layers of a kind share the compiled code, and all layers one limit of compilations. For each kind, training,
    logprobs and single rows need their own, more than torch's 8. Above the limit a layer runs uncompiled. If that
    begins between a forward pass and its recomputation, the two save different tensors, and the backward pass fails
    (`CheckpointError`).

    Floats of a layer, such as a norm's epsilon, are constants. Otherwise torch makes them inputs of the graph, meets
    one that has to be constant, such as attention's scale, and starts again. No cache has the first attempt.
    """
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_COMPILATIONS)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


class Scorer(nn.Module):
    """Applies a `Reader` to hidden states; only here the output layer runs, in pieces, and again in backward."""

    def __init__(self, output_layer: nn.Module, head: Head) -> None:
        super().__init__()
        self.output_layer = output_layer
        self._head = head

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits of this rank's vocabulary columns; leading dimensions as in `hidden`."""
        return capped(self.output_layer(hidden), self._head.softcap)

    def forward(self, before_NH: Tensor, targets_N: Tensor, scored_N: Tensor, reader: Reader) -> Any:
        """Apply the reader to these positions (see `Positions`)."""
        show_progress()
        return reader(self._logits, Positions(before_NH, targets_N, scored_N), self._head)


class LogprobModel(nn.Module):
    """Applies a `Reader` to a Hugging Face causal model; logits exist only inside `forward`, for scored tokens.

    No attention mask is passed: rows are padded on the right, so the causal mask keeps padding away from real tokens.
    In a packed row, Hugging Face's models find sequences by positions that restart at 0, `attention.py` by bounds.

    Args:
        causal_lm: The model.
        head: Settings for reading its logits.
        context_group: Ranks that share each row; None without context parallelism. Each computes its own tokens and
            gets all results, so losses and metrics cover whole rows and are equal on these ranks.
        replayed: Has the model's mixtures use the rows' routing; None if they choose all experts.
    """

    def __init__(
        self,
        causal_lm: Any,
        head: Head,
        context_group: dist.ProcessGroup | None = None,
        replayed: ReplayedExperts | None = None,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.scorer = Scorer(causal_lm.get_output_embeddings(), head)
        self._context_group = context_group
        self._replayed = replayed

    def replay(self, experts_TDK: Tensor | None) -> None:
        """Have mixtures use these experts from now on (see `ReplayedExperts`); None for their own choice."""
        if self._replayed is not None:
            self._replayed.use(experts_TDK)

    def forward(self, input_ids_BS: Tensor, rows: ModelRows, reader: Reader) -> Any:
        """Apply the reader to the scored tokens; its results become [B, S, ...] tensors, 0 at other tokens.

        Args:
            input_ids_BS: [B, S] int64.
            rows: The model's input tokens, and the scored tokens.
            reader: Gets the hidden states from which the scored tokens are predicted.
        """
        self.replay(rows.experts_TDK)
        hidden_RLH = self.causal_lm.base_model(**self.inputs(input_ids_BS, rows)).last_hidden_state
        return self.read(hidden_RLH, input_ids_BS, rows, reader)

    def read(self, hidden_RLH: Tensor, input_ids_BS: Tensor, rows: ModelRows, reader: Reader) -> Any:
        """Compute the result of `forward` from the last hidden states."""
        before_NH = hidden_RLH.flatten(0, 1).index_select(0, rows.before_N)
        targets_N = input_ids_BS.flatten().index_select(0, rows.scored_N)
        found = self.scorer(before_NH, targets_N, rows.scored_N, reader)

        def at_their_places(found_N: Tensor | None) -> Tensor | None:
            if found_N is None:
                return None
            whole = found_N.new_zeros(input_ids_BS.numel(), *found_N.shape[1:]).index_copy(0, rows.scored_N, found_N)
            whole = whole if self._context_group is None else sum_over(whole, self._context_group)
            return whole.unflatten(0, input_ids_BS.shape)

        return type(found)(*map(at_their_places, found))

    def inputs(self, input_ids_BS: Tensor, rows: ModelRows, embedded_RLH: Tensor | None = None) -> dict[str, Any]:
        """Return arguments for the Hugging Face model without its output layer.

        Args:
            input_ids_BS: As for `forward`.
            rows: As for `forward`.
            embedded_RLH: Replaces the output of the embedding.
        """
        ids_RL = input_ids_BS
        inputs: dict[str, Any] = {"use_cache": False}
        if rows.tokens_RL is not None:
            ids_RL = input_ids_BS.take(rows.tokens_RL)
        if rows.positions_RL is not None:
            inputs["position_ids"] = rows.positions_RL
        if self.causal_lm.config._attn_implementation in TAKES_BOUNDS:
            longest = max(rows.lengths, default=0)
            inputs |= {"cu_seq_lens_q": rows.bounds, "cu_seq_lens_k": rows.bounds}
            inputs |= {"max_length_q": longest, "max_length_k": longest}
        inputs |= sequence_arguments(self.causal_lm, rows.lengths, rows.bounds)
        return inputs | ({"input_ids": ids_RL} if embedded_RLH is None else {"inputs_embeds": embedded_RLH})

    def hf_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return parameters by their Hugging Face names; a tied one once, under its first name."""
        return [(name.removeprefix(PREFIX), parameter) for name, parameter in self.named_parameters()]
