"""Forward and backward passes through Megatron's schedules: losses while training, logprobs otherwise.

Logits never leave the model: `GPTModel`'s output processor calls the output layer chunk by chunk, and the last pipeline
stage returns the results of a `Reader`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_offload_rl.backends.megatron import parallel
from nemo_offload_rl.backends.megatron.activation_offload import ActivationOffloading
from nemo_offload_rl.backends.megatron.layout import ModelInput, by_place, lay_out
from nemo_offload_rl.backends.megatron.model import BuiltModel
from nemo_offload_rl.backends.megatron.replayed_experts import ReplayedExperts
from nemo_offload_rl.backends.megatron.upstream.balancing import (
    adds_router_loss,
    num_tokens_of_step,
    router_loss_scale,
)
from nemo_offload_rl.backends.scoring.readers import ReadHiddenStates, read_loss, reader_for
from nemo_offload_rl.data.batch import LossNorm, TokenBatch, TrainBatch
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.protocols.loss import LossFn
from nemo_offload_rl.protocols.scoring import Head, Positions, Reader, TeacherHead
from nemo_offload_rl.protocols.vocab import VocabShard
from nemo_offload_rl.utils.liveness import show_progress


class Passes:
    """Runs micro-batches through a model.

    Args:
        model: The model.
        settings: The policy's settings.
        cfg: The Megatron backend's settings.
        activations: Guards the passes if activations are offloaded.
        device: Device of the micro-batches.

    Attributes:
        teacher_head: The teacher's head, for losses that read it.
    """

    def __init__(
        self,
        model: BuiltModel,
        settings: PolicySettings,
        cfg: MegatronConfig,
        activations: ActivationOffloading,
        device: torch.device,
    ) -> None:
        self._chunks = model.chunks
        self._device = device
        self._activations = activations
        self._max_length = settings.max_total_sequence_length
        self._empties_cache = cfg.empty_unused_memory_level >= 2 and device.type == "cuda"
        self._pack = settings.sequence_packing.enabled
        self._temperature = settings.logprob_temperature
        self._chunk_size = settings.logprob_chunk_size
        self._filter = settings.logprob_filter
        tp_group = parallel.tensor_parallel_group()
        self._sequence_parallel_size = tp_group.size() if cfg.sequence_parallel else 1
        self._sequence_parallel_rank = tp_group.rank() if cfg.sequence_parallel else 0
        self._sequence_part = self._sequence_parallel_rank, self._sequence_parallel_size
        self._config = model.config
        self._adds_router_loss = adds_router_loss(cfg) and model.config.num_moe_experts is not None
        self._counts_tokens = self._adds_router_loss or cfg.moe_router_bias_update_rate > 0
        self._replayed = ReplayedExperts(model.chunks) if settings.router_replay.enabled else None
        self._token_multiple = cfg.fp8_cfg.token_multiple
        # Megatron does not pad the vocabulary here; a size that does not divide evenly was refused.
        num_rows = model.hf_config.vocab_size // tp_group.size()
        self.shard = VocabShard(tp_group.rank() * num_rows, tp_group if tp_group.size() > 1 else None)
        self.teacher_head: TeacherHead | None = None

    @contextmanager
    def training(self, micro_batches: Sequence[TrainBatch]) -> Iterator[None]:
        """Wrap a forward and backward pass over the micro-batches of a global batch."""
        if self._adds_router_loss:
            num_tokens = num_tokens_of_step(micro_batches, self._device)
            self._config.moe_grad_scale_func = partial(router_loss_scale, self._config, num_tokens, self._device)
        with self._activations.training_pass(len(micro_batches)):
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wrap a pass without gradients and dropout."""
        with torch.no_grad(), self._activations.forward_only():
            yield

    def reader_of(self, loss_fn: LossFn) -> Callable[[Any], Reader]:
        """Return a function that makes the reader of a micro-batch on the device."""
        return lambda batch: reader_for(loss_fn, batch, self.teacher_head)

    def schedule(
        self,
        micro_batches: Sequence[Any],
        consume: Callable[[Any, Any], tuple[Tensor, Any]],
        reader_of: Callable[[Any], Reader],
        before_micro_batch: Callable[[int], None] = lambda index: None,
        *,
        forward_only: bool,
    ) -> dict[str, Any]:
        """Return the arguments of Megatron's schedule for one or more micro-batches.

        `consume` turns the reader's output for a micro-batch into a scalar and a result. On the last pipeline stage
        the schedule returns these results.
        """
        for chunk in self._chunks:
            chunk.train(not forward_only)
        if self._replayed is not None:
            self._replayed.forget()

        def forward_step(batches: Iterator[tuple[int, Any]], chunk: Any) -> tuple[Any, Callable[[Any], Any]]:
            if self._empties_cache:
                torch.cuda.empty_cache()
            index, batch = next(batches)
            before_micro_batch(index)
            laid_out = lay_out(
                batch,
                device=self._device,
                pack=self._pack,
                sequence_parallel_size=self._sequence_parallel_size,
                token_multiple=self._token_multiple,
            )
            batch = batch.to(self._device)
            if self._replayed is not None and batch.routed_experts is not None:
                experts_TDK = laid_out.of_routers(batch.routed_experts, *self._sequence_part)
                self._replayed.use(experts_TDK, is_computed_again=not forward_only)

            def reduce(scores_BS: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Any]:
                scalar, result = consume(scores_BS, batch)  # Megatron's wrappers make a named tuple a plain one
                # A token count of 0: losses are already divided by the counts of the global batch.
                return scalar, torch.zeros((), dtype=torch.int, device=self._device), result

            # The reader's output on the last pipeline stage, hidden states on the others.
            output = chunk(
                input_ids=laid_out.ids_RL,
                position_ids=laid_out.positions_RL,
                attention_mask=None,  # attention is causal and rows are padded on the right
                packed_seq_params=laid_out.packed,
                padding_mask=self._padding_of(laid_out) if self._counts_tokens and not forward_only else None,
                output_processor=partial(self._read, reader_of(batch)),
                output_processor_context=laid_out,
            )
            return output, reduce

        return {
            "forward_step_func": forward_step,
            "data_iterator": iter(enumerate(micro_batches)),
            "model": list(self._chunks),
            "num_microbatches": len(micro_batches),
            # Used only by pipelines with fixed shapes; stages here send each other the shapes.
            "seq_length": self._max_length,
            "micro_batch_size": 1,
            "forward_only": forward_only,
        }

    def _padding_of(self, laid_out: ModelInput) -> Tensor:
        """Return the padding mask for routers. Megatron splits it with the sequence on the first stage only."""
        if parallel.is_first_stage():
            return laid_out.is_padding_RL
        return laid_out.is_padding_RL.chunk(self._sequence_parallel_size, dim=1)[self._sequence_parallel_rank]

    def _read(
        self,
        reader: Reader,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        context: ModelInput,
        **_: Any,
    ) -> Any:
        """Read scores [B, S, ...] from this rank's last hidden states [L / sequence_parallel_size, R, hidden].

        With sequence parallelism the output layer gathers equally many positions from each rank. So each of a rank's P
        positions stands for one position on each of X ranks, and is scored if any of these is.
        """
        splits, (length, rows) = self._sequence_parallel_size, hidden_states.shape[:2]

        def logits(hidden_N1H: Tensor) -> Tensor:
            found, _ = output_layer(hidden_N1H, weight=output_weight, runtime_gather_output=False)
            # The gathered positions are ordered by rank.
            return found.unflatten(0, (splits, len(hidden_N1H))).squeeze(2).transpose(0, 1)

        targets_PX, sources_PX = (by_place(value, splits) for value in (context.targets_RL, context.sources_RL))
        hidden_N1H = hidden_states.flatten(0, 1).index_select(0, context.places_N).unsqueeze(1)
        targets_NX, sources_NX = (value.index_select(0, context.places_N) for value in (targets_PX, sources_PX))
        if isinstance(reader, ReadHiddenStates):
            hidden_N1H = _of_all_ranks(hidden_N1H, splits)
        chunk_size = None if self._chunk_size is None else max(1, self._chunk_size // splits)
        head = Head(self._temperature, chunk_size, self.shard, kept=self._filter)
        show_progress()
        found = reader(logits, Positions(hidden_N1H, targets_NX, sources_NX), head)

        def at_their_places(found_NX: Tensor | None) -> Tensor | None:
            if found_NX is None:
                return None
            found_PX = found_NX.new_zeros(*targets_PX.shape, *found_NX.shape[2:]).index_copy(
                0, context.places_N, found_NX
            )
            found_LR = found_PX.transpose(0, 1).unflatten(1, (length, rows)).flatten(0, 1)
            return context.of_samples(found_LR.transpose(0, 1))

        make: Any = type(found)  # a tuple with optional fields
        return make(*map(at_their_places, found))


def _of_all_ranks(hidden_N1H: Tensor, splits: int) -> Tensor:
    """Gather the hidden states of all sequence-parallel ranks as [N, X, H], without gradient."""
    if splits == 1:
        return hidden_N1H
    pieces = [torch.empty_like(hidden_N1H) for _ in range(splits)]
    dist.all_gather(pieces, hidden_N1H.contiguous(), group=parallel.tensor_parallel_group())
    return torch.cat(pieces, dim=1)


def losses_of(loss_fn: LossFn, norm: LossNorm) -> Callable[[Any, TrainBatch], tuple[Tensor, Any]]:
    """Return a `consume` for `Passes.schedule` that computes a micro-batch's loss and metrics."""

    def consume(scores_BS: Any, batch: TrainBatch) -> tuple[Tensor, tuple[Tensor, Mapping[str, Tensor]]]:
        loss, metrics = read_loss(loss_fn, scores_BS, batch, norm)
        # Cloned, since the schedule scales the loss in place.
        return loss, (loss.detach().clone(), metrics)

    return consume


def keep_scores(scores_BS: tuple[Tensor | None, ...], batch: TokenBatch) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the scores of a micro-batch unchanged; a `consume` for `Passes.schedule`."""
    assert scores_BS[0] is not None
    return scores_BS[0].new_zeros((), dtype=torch.float32), scores_BS


def on_cpu(found: Sequence[tuple[Tensor | None, ...]]) -> list[Any]:
    """Copy scores to the CPU. Call it after all passes, since each copy waits for the device."""
    return [tuple(None if value is None else value.cpu() for value in scores_BS) for scores_BS in found]
