"""Passes of a model in parts that go layer by layer, for one rank (`cpu_offload`).

A part (`parts.py`) crosses the link once for many micro-batches: it comes, all of them go through it, it leaves.
Between the layers are hidden states of every micro-batch of a group. A group is what fits the device; parts cross once
for each.

In training each layer is computed again from its input before its backward, as with activation checkpointing, and the
gradients of a part are added up on the device over a group, in the order of micro-batches. So results are those of one
micro-batch after the other, bit for bit on a CPU.

Order of a group over an embedding E, layers 1 and 2 and an output layer O: E 1 2 O, whose backward is O 2 1 E; E needs
no weights in it. With tied embeddings O is E, and in each micro-batch their gradients are added up in the compute type.
So these are computed together, and the output layer once more: E 1 2 E, backward 2 1 E.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from nemo_offload_rl.backends.dtensor.built import BuiltModel
from nemo_offload_rl.backends.dtensor.host_held.parts import gradient_norms
from nemo_offload_rl.backends.dtensor.host_held.stand_ins import LayerInputs, SteppedModel, UnsuitedError
from nemo_offload_rl.backends.dtensor.layout import ModelRows
from nemo_offload_rl.backends.dtensor.parallel import add_gradients, cast_inputs, gathered
from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.protocols.scoring import Reader
from nemo_offload_rl.residency import PassingParts
from nemo_offload_rl.residency.streams.work_memory import MARGIN, RESERVE_BYTES

type ReaderOf[Batch: TokenBatch] = Callable[[Batch], Reader]
"""The reader for a micro-batch that is on the device."""

type LossOf[Batch: TokenBatch] = Callable[[Any, Batch], tuple[Tensor, dict[str, Tensor]]]
"""Loss and metrics of what its reader gives."""


@dataclass
class _OnItsWay[Batch: TokenBatch]:
    """A micro-batch between two parts.

    Attributes:
        batch: On the device.
        rows: What the model gets.
        given: To the layers.
        hidden: What the last part gave; in the backward pass its gradient.
        inputs: In training, of each layer that has run.
        output: With tied embeddings in training, what the last layer gave.
        scores_grads: Likewise, gradients of what the reader found.
    """

    batch: Batch
    rows: ModelRows
    given: LayerInputs
    hidden: Tensor
    inputs: list[Tensor] = field(default_factory=list[Tensor])
    output: Tensor | None = None
    scores_grads: Sequence[Tensor | None] = ()


@dataclass(frozen=True)
class _Work:
    """What a pass needed of the device beside what it keeps between layers.

    Attributes:
        num_bytes: At most, at any time.
        tokens: Of its largest micro-batch.
    """

    num_bytes: int
    tokens: int

    def expected_bytes(self, tokens: int) -> int:
        """With micro-batches of up to so many tokens, and a margin."""
        return int(MARGIN * self.num_bytes * max(1.0, tokens / self.tokens)) + RESERVE_BYTES


class LayerwisePasses:
    """Runs passes over micro-batches.

    Args:
        built: The model, in parts.
        passing: Moves them.

    Attributes:
        norms: Of each gradient in a part after a training pass, a 0-dim tensor on the device.
    """

    def __init__(self, built: BuiltModel, passing: PassingParts) -> None:
        self.norms: dict[nn.Parameter, Tensor] = {}
        self._built = built
        self._passing = passing
        self._parts = built.parts
        self._num_layers = len(built.layers)
        self._is_tied = self._parts[0].first is not self._parts[0].last
        self._output = 0 if self._is_tied else len(self._parts) - 1
        self._largest_bytes = max(sum(p.nbytes for _, p in part.parameters) for part in self._parts)
        self._model = SteppedModel(built)
        self._most_bytes: dict[int, int] = {}  # of a group, by the number of hidden states that are kept
        self._last_group = (0, 0, 0)  # that number, its bytes, and its micro-batches
        self._work: dict[int, _Work] = {}  # by the same number, of the last group
        self._begun_bytes = 0  # on the device as the present group began
        self._tokens = 0  # of the largest micro-batch of the pass
        self._num_keeping_nothing = 0  # next training passes that keep no parts for the update
        self._next_pause = 1  # of keeping, in passes, after the next lack of memory
        self._may_keep = False  # parts for the update, in the present pass
        self._has_kept = False  # in the present pass

    @torch.no_grad()
    def unsuited(self, micro_batch: TokenBatch) -> str | None:
        """Why the model's layers cannot run one by one; None where they can. Brings the embedding and a layer.

        Args:
            micro_batch: Any, on the host.
        """
        try:
            # With gradients, as in training: nothing but hidden states may have one.
            with self._ready(), self._passing.on_device(0), gathered(self._unit(0)), torch.enable_grad():
                given = self._embedded(micro_batch).given
            # Compiled for this size, it would be compiled again for others.
            with self._passing.on_device(1), gathered(self._unit(1)), torch.compiler.set_stance("force_eager"):
                output: Any = self._model.layer(0, given.hidden, given)
        except UnsuitedError as error:
            return str(error)
        if not isinstance(output, Tensor) or output.shape != given.hidden.shape:
            return "its layers give something else than hidden states"
        return None

    def make_groups_smaller(self) -> bool:
        """After memory has run out: no parts are kept for the update, or groups like the last one are half as large.

        Parts are kept again after a pause, which is twice as long each time.

        Returns:
            False if none were and it was one micro-batch.
        """
        if self._has_kept:
            self._has_kept = False
            self._num_keeping_nothing = 1 + self._next_pause  # the pass that is run again among them
            self._next_pause *= 2
            return True
        num_kept, num_bytes, num_together = self._last_group
        self._last_group = (0, 0, 0)  # a pass that fails before it has a group of its own has none to divide
        # What a group takes was foreseen from its first micro-batches, and may be more than the limit already.
        self._most_bytes[num_kept] = min(num_bytes, self._most_bytes.get(num_kept, num_bytes)) // 2
        return num_together > 1

    # -- passes

    @torch.no_grad()
    def read[Batch: TokenBatch](
        self, micro_batches: Sequence[Batch], reader_of: ReaderOf[Batch]
    ) -> list[tuple[Any, Batch]]:
        """What a reader gives of each micro-batch, [B, S, ...], and the micro-batch on the device."""
        found: list[tuple[Any, Batch]] = []
        self._begin(micro_batches)
        with self._passing.charged(), self._ready():
            while len(found) < len(micro_batches):
                group = self._embed(micro_batches[len(found) :], num_kept=2)
                self._forward(group, keeps_inputs=False)
                has_more = len(found) + len(group) < len(micro_batches)
                with self._present(self._output, 0 if has_more and not self._is_tied else None):
                    for it in group:
                        found.append((self._scores(it, it.hidden, reader_of(it.batch)), it.batch))
                self._learn()
        return found

    def train[Batch: TokenBatch](
        self,
        micro_batches: Sequence[Batch],
        reader_of: ReaderOf[Batch],
        loss_of: LossOf[Batch],
        before_micro_batch: Callable[[int], None],
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Add the gradients of all micro-batches; gives the loss and metrics of each.

        Args:
            micro_batches: On the host.
            reader_of: The reader of a micro-batch that is on the device.
            loss_of: Loss and metrics of what it gives.
            before_micro_batch: Called with the place of each before its last computation.
        """
        self.norms = {}
        found: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._begin(micro_batches)
        self._may_keep = self._num_keeping_nothing == 0
        self._num_keeping_nothing = max(0, self._num_keeping_nothing - 1)
        with self._passing.charged(), self._ready():
            while (num_done := len(found)) < len(micro_batches):
                group = self._embed(micro_batches[num_done:], num_kept=self._num_layers + 2)
                is_last = num_done + len(group) == len(micro_batches)
                self._forward(group, keeps_inputs=True)
                found += self._backward_of_output(group, reader_of, loss_of, measures=is_last)
                self._backward_of_layers(group, measures=is_last)
                places = range(num_done, len(found))
                self._backward_of_embedding(group, reader_of, places, before_micro_batch, measures=is_last)
                self._learn()
        return found

    # -- the parts of a pass

    def _embed[Batch: TokenBatch](self, micro_batches: Sequence[Batch], num_kept: int) -> list[_OnItsWay[Batch]]:
        """As many of the micro-batches, one at least, as have room for `num_kept` hidden states each."""
        group: list[_OnItsWay[Batch]] = []
        free_bytes, work = self._passing.free_bytes(), self._work.get(num_kept)
        self._begun_bytes = self._passing.allocated_bytes()
        self._passing.restart_peak()
        if work is not None:
            limit_bytes = free_bytes - work.expected_bytes(self._tokens)
        else:
            # Beside them a pass takes at most 16 bytes for each of a part's parameters (the cast copy, gradients, the
            # next part), and what one layer, or the logits, need for a micro-batch: the other half, perhaps too little.
            limit_bytes = (free_bytes - 4 * self._largest_bytes) // 2
        limit_bytes = min(limit_bytes, self._most_bytes.get(num_kept, limit_bytes))
        used_bytes = tokens = 0
        with self._present(0, following=1):
            for micro_batch in micro_batches:
                num_tokens = self._built.num_tokens(micro_batch)
                if group and used_bytes + used_bytes * num_tokens // tokens > limit_bytes:
                    break
                group.append(self._embedded(micro_batch))
                given = group[-1].given
                used_bytes += num_kept * given.hidden.nbytes + given.others_bytes()
                tokens += num_tokens
                self._last_group = (num_kept, used_bytes, len(group))
        return group

    def _begin(self, micro_batches: Sequence[TokenBatch]) -> None:
        """A pass begins."""
        self._tokens = max(map(self._built.num_tokens, micro_batches), default=0)
        self._has_kept = False

    def _learn(self) -> None:
        """Note what the present group needed; the next ones may fill the rest.

        The peak need not be where most hidden states are kept. With so many more it grows by no more than they are.
        """
        num_kept, used_bytes, _ = self._last_group
        peak_bytes = self._passing.restart_peak()
        if peak_bytes and not self._has_kept:
            num_bytes, before = peak_bytes - self._begun_bytes - used_bytes, self._work.get(num_kept, _Work(0, 1))
            self._work[num_kept] = _Work(max(num_bytes, before.num_bytes), max(self._tokens, before.tokens))

    def _forward(self, group: Sequence[_OnItsWay[Any]], *, keeps_inputs: bool) -> None:
        for index in range(self._num_layers):
            is_last = index == self._num_layers - 1
            with self._present(index + 1, following=self._output if is_last else index + 2):
                for it in group:
                    hidden = cast_inputs(it.hidden, self._built.compute_dtype).detach()
                    if keeps_inputs:
                        # With the kernels that compute it again, whose graph is gone at once.
                        it.inputs.append(hidden.requires_grad_())
                    it.hidden = self._model.layer(index, hidden, it.given).detach()

    def _backward_of_output[Batch: TokenBatch](
        self,
        group: Sequence[_OnItsWay[Batch]],
        reader_of: ReaderOf[Batch],
        loss_of: LossOf[Batch],
        *,
        measures: bool,
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        found: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._passing.restart_peak()  # states of the step before may have been leaving
        last_layer = self._num_layers
        gradients = last_layer if self._is_tied else self._output
        with self._present(self._output, following=last_layer, with_gradients=gradients):
            if not self._is_tied:
                self._passing.bring_gradients(self._output)
            for it in group:
                hidden = it.hidden.detach().requires_grad_()
                scores = self._scores(it, hidden, reader_of(it.batch))
                loss, metrics = loss_of(scores, it.batch)
                found.append((loss.detach(), metrics))
                if self._is_tied:
                    self._differentiate(it, hidden, scores, loss)
                    continue
                loss.backward()
                it.hidden = cast(Tensor, hidden.grad)
                self._add_gradients(self._output)
        if not self._is_tied:
            self._send_gradients(self._output, measures)
        return found

    def _differentiate(self, it: _OnItsWay[Any], hidden: Tensor, scores: Any, loss: Tensor) -> None:
        """Gradients of hidden states and scores; parameters get theirs together with the embedding's."""
        with_graph = _with_graph(scores)
        it.scores_grads = torch.autograd.grad(loss, with_graph, allow_unused=True)
        pairs = [(score, grad) for score, grad in zip(with_graph, it.scores_grads, strict=True) if grad is not None]
        (gradient,) = torch.autograd.grad([score for score, _ in pairs], [hidden], [grad for _, grad in pairs])
        it.output, it.hidden = hidden.detach(), gradient

    def _backward_of_layers(self, group: Sequence[_OnItsWay[Any]], *, measures: bool) -> None:
        for index in reversed(range(self._num_layers)):
            part = index + 1
            # An embedding of its own needs no weights now, but with the next group.
            following = part - 1 if index or self._is_tied or not measures else None
            with self._present(part, following=following, with_gradients=part - 1):
                self._passing.bring_gradients(part)
                for it in group:
                    hidden = it.inputs.pop()
                    output = self._model.layer(index, hidden, it.given)
                    torch.autograd.backward([output], [it.hidden.to(output.dtype)])
                    it.hidden = cast(Tensor, hidden.grad)
                    self._add_gradients(part)
            self._send_gradients(part, measures)

    def _backward_of_embedding[Batch: TokenBatch](
        self,
        group: Sequence[_OnItsWay[Batch]],
        reader_of: ReaderOf[Batch],
        places: Iterable[int],
        before_micro_batch: Callable[[int], None],
        *,
        measures: bool,
    ) -> None:
        with self._present(0) if self._is_tied else nullcontext():
            self._passing.bring_gradients(0)
            for place, it in zip(places, group, strict=True):
                before_micro_batch(place)
                outputs, grads = [it.given.hidden], [it.hidden]
                if it.output is not None:
                    scores = _with_graph(self._scores(it, it.output, reader_of(it.batch)))
                    pairs = [pair for pair in zip(scores, it.scores_grads, strict=True) if pair[1] is not None]
                    outputs += [score for score, _ in pairs]
                    grads += [grad for _, grad in pairs]
                torch.autograd.backward(outputs, grads)
                self._add_gradients(0)
        self._send_gradients(0, measures)

    def _embedded[Batch: TokenBatch](self, micro_batch: Batch) -> _OnItsWay[Batch]:
        batch, rows = self._built.on_device(micro_batch)
        given = self._model.embed(batch.input_ids, rows)
        return _OnItsWay(batch, rows, given, given.hidden.detach())

    def _scores(self, it: _OnItsWay[Any], hidden: Tensor, reader: Reader) -> Any:
        return self._model.read(hidden, it.batch.input_ids, it.rows, reader)

    # -- parts

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """What is in no part is there in the compute type, and nothing comes by hooks."""
        with gathered(self._built.fsdp_root), self._model.without_hooks():
            yield

    def _unit(self, index: int) -> FSDPModule:
        return cast(FSDPModule, self._parts[index].first)

    @contextmanager
    def _present(
        self, index: int, following: int | None = None, *, with_gradients: int | None = None
    ) -> Iterator[None]:
        """A part's cast parameters on the device; they themselves leave at once, for those of the `following` one."""
        self._passing.bring(index)
        with gathered(self._unit(index)):
            self._passing.has_read(index, following, with_gradients=with_gradients)
            yield

    def _add_gradients(self, index: int) -> None:
        add_gradients(self._unit(index))
        add_gradients(self._built.fsdp_root)

    def _send_gradients(self, index: int, measures: bool) -> None:
        """Send a part's gradients away, or after the last pass over it keep the part for the update."""
        if measures:
            self.norms |= gradient_norms(parameter for _, parameter in self._parts[index].parameters)
            if self._may_keep and self._keeps(index):
                return
        self._passing.has_gradients(index)

    def _keeps(self, index: int) -> bool:
        """Keep a part for the update if it has room beside the rest of the pass."""
        self._learn()
        work = self._work.get(self._num_layers + 2)
        if work is None or not self._passing.keep(index, work.expected_bytes(self._tokens)):
            return False
        self._has_kept = True
        return True


def _with_graph(scores: Iterable[Tensor | None]) -> list[Tensor]:
    return [score for score in scores if score is not None and score.requires_grad]
