"""Passes over a model in parts, layer by layer, for one rank (`cpu_offload`).

A part (the embedding, a layer, the output layer) is an FSDP unit. It comes to the device, all micro-batches of a group
go through it, and it leaves. A group has as many micro-batches as fit the device, at least one; between parts their
hidden states stay there.

In training each layer is computed again from its input before its backward, as with activation checkpointing. A part's
gradients are summed on the device over a group, in the order of micro-batches. So results are those of one
micro-batch after the other, bit for bit on a CPU.

Order of a group over an embedding E, layers 1 and 2 and an output layer O: forward E 1 2 O, backward O 2 1 E, where E
needs no weights. With tied embeddings O is E, and their gradients must be summed in the compute type in each
micro-batch. So E's backward computes the output layer again, for both gradients: forward E 1 2 E, backward 2 1 E.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from nemo_offload_rl.backends.dtensor.activation_offload import ActivationOffloading, KeptInput
from nemo_offload_rl.backends.dtensor.built import BuiltModel
from nemo_offload_rl.backends.dtensor.group_sizes import GroupSizes
from nemo_offload_rl.backends.dtensor.model import ModelRows
from nemo_offload_rl.backends.dtensor.one_rank import add_gradients
from nemo_offload_rl.backends.dtensor.optim import gradient_norms
from nemo_offload_rl.backends.dtensor.parallel import cast_inputs, gathered
from nemo_offload_rl.backends.dtensor.stand_ins import LayerInputs, SteppedModel, unsuited
from nemo_offload_rl.backends.dtensor.supported import DROPS_AT_RANDOM
from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.models.families import dropout_rates
from nemo_offload_rl.protocols.scoring import Reader
from nemo_offload_rl.residency import PassingParts

_ON_DEVICE = 4  # layer inputs on the device if they are offloaded: the first, last, present and next one

type ReaderOf[Batch: TokenBatch] = Callable[[Batch], Reader]
"""Returns the reader for a micro-batch that is on the device."""

type LossOf[Batch: TokenBatch] = Callable[[Any, Batch], tuple[Tensor, dict[str, Tensor]]]
"""Computes loss and metrics of a micro-batch from its reader's result."""


@dataclass
class _OnItsWay[Batch: TokenBatch]:
    """A micro-batch between two parts.

    Attributes:
        batch: The micro-batch, on the device.
        rows: The model's rows for it.
        given: Arguments of the layers.
        hidden: Output of the last computed part; in the backward pass its gradient.
        inputs: In training, the input of each layer that has run.
        output: With tied embeddings in training, the output of the last layer.
        scores_grads: With tied embeddings in training, gradients of the reader's scores.
    """

    batch: Batch
    rows: ModelRows
    given: LayerInputs
    hidden: Tensor
    inputs: list[KeptInput] = field(default_factory=list[KeptInput])
    output: Tensor | None = None
    scores_grads: Sequence[Tensor | None] = ()


class LayerwisePasses:
    """Runs passes over micro-batches, part by part.

    Args:
        built: The model, in parts.
        passing: Moves the parts.
        activations: Offloads the inputs of layers, with one micro-batch in each group; None to keep them on the device.

    Attributes:
        norms: Norm of each gradient in the parts after a training pass, a 0-dim tensor on the device.
    """

    def __init__(
        self, built: BuiltModel, passing: PassingParts, activations: ActivationOffloading | None = None
    ) -> None:
        self.norms: dict[nn.Parameter, Tensor] = {}
        self._built = built
        self._passing = passing
        self._activations = activations
        self._parts = built.parts
        self._num_layers = len(built.layers)
        self._is_tied = len(self._parts) == self._num_layers + 1
        self._output = 0 if self._is_tied else self._num_layers + 1
        self._model = SteppedModel(built)
        self._sizes = GroupSizes(
            passing,
            max(sum(p.nbytes for _, p in part.parameters) for part in self._parts),
            num_kept_reading=2,
            num_kept_training=(self._num_layers if activations is None else _ON_DEVICE) + 2,
        )

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model whose layers cannot run one by one, by running the embedding and a layer.

        Raises:
            ConfigError: Names the obstacle.
        """
        config = self._built.module.causal_lm.config.to_dict()
        modules = self._built.module.modules()
        if dropout_rates(config) or any(isinstance(module, nn.Dropout) and module.p for module in modules):
            raise ConfigError(DROPS_AT_RANDOM)
        batch = TokenBatch(input_ids=torch.zeros(1, 2, dtype=torch.int64), input_lengths=torch.tensor([2]))
        # With gradients, as in training: only hidden states may have one.
        with self._ready(), self._passing.on_device(0), gathered(self._unit(0)), torch.enable_grad():
            given = self._embedded(batch).given
        # Not compiled: a layer compiled for this size would be compiled again for others.
        with self._passing.on_device(1), gathered(self._unit(1)), torch.compiler.set_stance("force_eager"):
            output: Any = self._model.layer(0, given.hidden, given)
        if not isinstance(output, Tensor) or output.shape != given.hidden.shape:
            raise unsuited("its layers return something other than hidden states")

    # -- passes

    @torch.no_grad()
    def read[Batch: TokenBatch](
        self, micro_batches: Sequence[Batch], reader_of: ReaderOf[Batch]
    ) -> list[tuple[Any, Batch]]:
        """Return for each micro-batch its reader's result, [B, S, ...], and the micro-batch on the device."""
        found: list[tuple[Any, Batch]] = []
        self._sizes.begin(self._most_tokens(micro_batches), trains=False)
        with self._passing.charged(), self._ready():
            while len(found) < len(micro_batches):
                group = self._embed(micro_batches[len(found) :])
                self._forward(group, keeps_inputs=False)
                has_more = len(found) + len(group) < len(micro_batches)
                with self._present(self._output, 0 if has_more and not self._is_tied else None):
                    for it in group:
                        found.append((self._scores(it, it.hidden, reader_of(it.batch)), it.batch))
                self._sizes.learn()
        return found

    def train[Batch: TokenBatch](
        self,
        micro_batches: Sequence[Batch],
        reader_of: ReaderOf[Batch],
        loss_of: LossOf[Batch],
        before_micro_batch: Callable[[int], None],
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Accumulate the gradients of all micro-batches; return the loss and metrics of each.

        Args:
            micro_batches: The micro-batches, on the host.
            reader_of: See `ReaderOf`.
            loss_of: See `LossOf`.
            before_micro_batch: Called with the index of each micro-batch before its last computation.
        """
        self.norms = {}
        found: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._sizes.begin(self._most_tokens(micro_batches), trains=True)
        with self._passing.charged(), self._ready():
            while (num_done := len(found)) < len(micro_batches):
                waiting = micro_batches[num_done:]
                if self._activations is not None:
                    waiting = waiting[:1]  # host memory holds the layer inputs of one micro-batch
                group = self._embed(waiting)
                is_last = num_done + len(group) == len(micro_batches)
                self._forward(group, keeps_inputs=True)
                found += self._backward_of_output(group, reader_of, loss_of, measures=is_last)
                self._backward_of_layers(group, measures=is_last)
                places = range(num_done, len(found))
                self._backward_of_embedding(group, reader_of, places, before_micro_batch, measures=is_last)
                self._sizes.learn()
        return found

    def make_room(self) -> bool:
        """See `GroupSizes.shrink`."""
        return self._sizes.shrink()

    def drop(self) -> None:
        """Drop gradients and gathered parameters."""
        self._passing.drop_gradients()
        self._built.drop_grads()
        self.norms = {}

    # -- groups

    def _most_tokens(self, micro_batches: Sequence[TokenBatch]) -> int:
        return max(map(self._built.num_tokens, micro_batches), default=0)

    def _embed[Batch: TokenBatch](self, micro_batches: Sequence[Batch]) -> list[_OnItsWay[Batch]]:
        """Embed as many micro-batches, at least one, as have room for their kept hidden states."""
        group: list[_OnItsWay[Batch]] = []
        self._sizes.begin_group()
        with self._present(0, following=1):
            for micro_batch in micro_batches:
                num_tokens = self._built.num_tokens(micro_batch)
                if not self._sizes.has_room(num_tokens):
                    break
                group.append(self._embedded(micro_batch))
                given = group[-1].given
                self._sizes.add(num_tokens, given.hidden.nbytes, given.others_bytes())
        return group

    # -- the parts of a pass

    def _forward(self, group: Sequence[_OnItsWay[Any]], *, keeps_inputs: bool) -> None:
        for index in range(self._num_layers):
            is_last = index == self._num_layers - 1
            with self._present(index + 1, following=self._output if is_last else index + 2):
                for it in group:
                    hidden = cast_inputs(it.hidden, self._built.compute_dtype).detach()
                    if not keeps_inputs:
                        it.hidden = self._model.layer(index, hidden, it.given).detach()
                        continue
                    # With gradient, so that the same kernels run as in the recomputation; the graph is dropped at once.
                    kept = self._keep_input(it, hidden.requires_grad_(), stays=is_last or not index)
                    it.hidden = self._model.layer(index, hidden, it.given).detach()
                    kept.release()

    def _keep_input(self, it: _OnItsWay[Any], hidden: Tensor, *, stays: bool) -> KeptInput:
        """Keep a layer's input for its backward; with `stays` it is not offloaded."""
        if self._activations is None:
            kept = KeptInput(hidden)
        else:
            kept = self._activations.keep(hidden, it.inputs[-1] if it.inputs else None, stays=stays)
        it.inputs.append(kept)
        return kept

    def _backward_of_output[Batch: TokenBatch](
        self,
        group: Sequence[_OnItsWay[Batch]],
        reader_of: ReaderOf[Batch],
        loss_of: LossOf[Batch],
        *,
        measures: bool,
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        found: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._passing.restart_peak()  # the last step's states may still have been leaving
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
        """Compute gradients of hidden states and scores; the embedding's backward computes parameters' gradients."""
        with_graph = _with_graph(scores)
        it.scores_grads = torch.autograd.grad(loss, with_graph, allow_unused=True)
        pairs = [(score, grad) for score, grad in zip(with_graph, it.scores_grads, strict=True) if grad is not None]
        (gradient,) = torch.autograd.grad([score for score, _ in pairs], [hidden], [grad for _, grad in pairs])
        it.output, it.hidden = hidden.detach(), gradient

    def _backward_of_layers(self, group: Sequence[_OnItsWay[Any]], *, measures: bool) -> None:
        for index in reversed(range(self._num_layers)):
            part = index + 1
            # An untied embedding needs its weights only with the next group.
            following = part - 1 if index or self._is_tied or not measures else None
            # Before the next part's gradients come, so at most three parts' gradients are on the device.
            self._passing.bring_gradients(part)
            with self._present(part, following=following, with_gradients=part - 1):
                for it in group:
                    hidden = it.inputs.pop().read().requires_grad_()
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
        """Within the context, gather the parameters outside of all parts, and run no FSDP hooks."""
        with gathered(self._built.fsdp_root), self._model.without_hooks():
            yield

    def _unit(self, index: int) -> FSDPModule:
        return cast(FSDPModule, self._parts[index].unit)

    @contextmanager
    def _present(
        self, index: int, following: int | None = None, *, with_gradients: int | None = None
    ) -> Iterator[None]:
        """Bring a part and cast its parameters; the originals leave at once to make room for the `following` part."""
        self._passing.bring(index)
        with gathered(self._unit(index)):
            self._passing.has_read(index, following, with_gradients=with_gradients)
            yield

    def _add_gradients(self, index: int) -> None:
        add_gradients(self._unit(index))
        add_gradients(self._built.fsdp_root)

    def _send_gradients(self, index: int, measures: bool) -> None:
        """Offload a part's gradients, or keep the part for the update after its last backward (`measures`)."""
        if measures:
            self.norms |= gradient_norms(parameter for _, parameter in self._parts[index].parameters)
            if self._sizes.keeps(index):
                return
        self._passing.has_gradients(index)


def _with_graph(scores: Iterable[Tensor | None]) -> list[Tensor]:
    return [score for score in scores if score is not None and score.requires_grad]
