"""Passes of a model in parts that go layer by layer, for one rank (`cpu_offload`).

A part (`parts.py`) crosses the link once for many micro-batches: it comes, all of them go through it, it leaves. The
model is not taken apart. Its own forward runs with stand-ins in the place of the layers, which record what else than
hidden states each layer is given (rotary angles, masks); each layer then runs by itself; and the model's forward runs
once more from the last layer's output on. Between the layers are their inputs, of every micro-batch of a group. A
group is what fits the device; several groups are several crossings.

In training each layer is computed again from its input before its backward, as with activation checkpointing, and the
gradients of a part are added up on the device over a group, in the order of micro-batches. So results are those of one
micro-batch after the other, bit for bit on a CPU.

Order of a group over an embedding E, layers 1 and 2 and an output layer O: E 1 2 O, whose backward is O 2 1 E; E needs
no weights in it. With tied embeddings O is E, and one gradient is the sum of both in each micro-batch, in the compute
type: E 1 2 E, backward 2 1 E, where the output layer is computed again.

FSDP's hooks take no part: of FSDP there are the cast copies of parameters, and gradients in its layout.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.policy.backends.dtensor.built import BuiltModel
from nemo_offload_rl.policy.backends.dtensor.layout import ModelRows
from nemo_offload_rl.policy.backends.dtensor.parallel import add_gradients, cast_inputs, gathered
from nemo_offload_rl.policy.backends.dtensor.parts import gradient_norms
from nemo_offload_rl.policy.backends.readers import Reader
from nemo_offload_rl.residency import PassingParts

_DRAWS = ("dropout", "drop", "pdrop", "jitter_noise")
_NO_ID = -1  # those of torch's hooks begin at 0
_PLAIN = (Tensor, bool, int, float, str, torch.dtype, type(None))


class UnsuitedError(Exception):
    """The model's forward is more than its layers one after the other."""


@dataclass
class _OnItsWay[Batch: TokenBatch]:
    """A micro-batch between two parts.

    Attributes:
        batch: On the device.
        rows: What the model gets.
        embedded: The first layer's input, in training with the graph of what made it.
        calls: What each layer is given beside hidden states.
        hidden: What the last part gave; in the backward pass its gradient.
        inputs: In training, of each layer that has run.
        output: With tied embeddings in training, what the last layer gave.
        scores_grads: Likewise, gradients of what the reader found.
    """

    batch: Batch
    rows: ModelRows
    embedded: Tensor
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    hidden: Tensor
    inputs: list[Tensor] = field(default_factory=list[Tensor])
    output: Tensor | None = None
    scores_grads: Sequence[Tensor | None] = ()

    def num_bytes(self, num_kept: int) -> int:
        """Of so many hidden states, and of what layers are given beside."""
        given = {it.untyped_storage() for it in tree_leaves(self.calls) if isinstance(it, Tensor)}
        return num_kept * self.embedded.nbytes + sum(storage.nbytes() for storage in given)


class LayerwisePasses:
    """Runs passes over micro-batches.

    Args:
        built: The model, in parts.
        passing: Moves them.

    Attributes:
        norms: Of each gradient of the last training pass, a 0-dim tensor on the device; of those in parts only.
    """

    def __init__(self, built: BuiltModel, passing: PassingParts) -> None:
        self.norms: dict[nn.Parameter, Tensor] = {}
        self._built = built
        self._passing = passing
        self._parts = built.parts
        self._dtype = built.compute_dtype
        self._is_tied = self._parts[0].first is not self._parts[0].last
        self._output = 0 if self._is_tied else len(self._parts) - 1
        self._largest_bytes = max(sum(p.nbytes for _, p in part.parameters) for part in self._parts)
        self._hooked = (self._parts[0].first, self._parts[self._output].last)
        self._base: nn.Module = built.module.causal_lm.base_model
        self._name = next(name for name, child in self._base.named_children() if _is_of(child, built.layers[0]))
        self._relay: Callable[..., Tensor] | None = None
        self._stand_ins = nn.ModuleList(
            _StandIn(layer, index, self._passed_on) for index, layer in enumerate(built.layers)
        )

    @torch.no_grad()
    def unsuited(self, micro_batch: TokenBatch) -> str | None:
        """Why the model's layers cannot run one by one; None where they can. Brings the embedding and a layer.

        Args:
            micro_batch: Any, on the host.
        """
        try:
            with self._without_hooks(), self._passing.on_device(0), gathered(self._unit(0)):
                on_its_way = self._record(micro_batch)
            with self._passing.on_device(1), gathered(self._unit(1)):
                output: Any = self._layer(0, on_its_way, on_its_way.embedded)
        except UnsuitedError as error:
            return str(error)
        if not isinstance(output, Tensor) or output.shape != on_its_way.embedded.shape:
            return "its layers give something else than hidden states"
        return None

    # -- passes

    @torch.no_grad()
    def read[Batch: TokenBatch](
        self, micro_batches: Sequence[Batch], reader_of: Callable[[Batch], Reader]
    ) -> list[tuple[Any, Batch]]:
        """What a reader gives of each micro-batch, as `BuiltModel.read` has it."""
        found: list[tuple[Any, Batch]] = []
        with self._passing.charged(), self._without_hooks():
            while len(found) < len(micro_batches):
                group = self._embed(micro_batches[len(found) :], num_kept=2)
                self._forward(group, keeps_inputs=False)
                has_more = len(found) + len(group) < len(micro_batches)
                with self._present(self._output, 0 if has_more and not self._is_tied else None):
                    for it in group:
                        found.append((self._scores(it, it.hidden, reader_of(it.batch)), it.batch))
        return found

    def train[Batch: TokenBatch](
        self,
        micro_batches: Sequence[Batch],
        reader_of: Callable[[Batch], Reader],
        loss_of: Callable[[Any, Batch], tuple[Tensor, dict[str, Tensor]]],
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
        with self._passing.charged(), self._without_hooks():
            while (num_done := len(found)) < len(micro_batches):
                group = self._embed(micro_batches[num_done:], num_kept=len(self._stand_ins) + 2)
                is_last = num_done + len(group) == len(micro_batches)
                self._forward(group, keeps_inputs=True)
                found += self._backward_of_output(group, reader_of, loss_of, measures=is_last)
                self._backward_of_layers(group, measures=is_last)
                places = range(num_done, len(found))
                self._backward_of_embedding(group, reader_of, places, before_micro_batch, measures=is_last)
        return found

    # -- the parts of a pass

    def _embed[Batch: TokenBatch](self, micro_batches: Sequence[Batch], num_kept: int) -> list[_OnItsWay[Batch]]:
        """As many of the micro-batches, one at least, as have room for `num_kept` hidden states each."""
        group: list[_OnItsWay[Batch]] = []
        # What else a pass takes: cast copies, gradients and the next part, at most 16 bytes a parameter; activations
        # of one layer, or logits, which as little is known of as it was of those of one whole micro-batch.
        limit_bytes = (self._passing.free_bytes() - 4 * self._largest_bytes) // 2
        used_bytes = tokens = 0
        with self._present(0, following=1):
            for micro_batch in micro_batches:
                num_tokens = micro_batch.input_ids.numel()
                if group and used_bytes + used_bytes * num_tokens // tokens > limit_bytes:
                    break
                group.append(self._record(micro_batch))
                used_bytes += group[-1].num_bytes(num_kept)
                tokens += num_tokens
        return group

    @torch.no_grad()
    def _forward(self, group: Sequence[_OnItsWay[Any]], *, keeps_inputs: bool) -> None:
        for index in range(len(self._stand_ins)):
            is_last = index == len(self._stand_ins) - 1
            with self._present(index + 1, following=self._output if is_last else index + 2):
                for it in group:
                    given = cast_inputs(it.hidden, self._dtype)
                    if keeps_inputs:
                        it.inputs.append(given)
                    it.hidden = self._layer(index, it, given)

    def _backward_of_output[Batch: TokenBatch](
        self,
        group: Sequence[_OnItsWay[Batch]],
        reader_of: Callable[[Batch], Reader],
        loss_of: Callable[[Any, Batch], tuple[Tensor, dict[str, Tensor]]],
        *,
        measures: bool,
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        found: list[tuple[Tensor, dict[str, Tensor]]] = []
        last_layer = len(self._stand_ins)
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
        for index in reversed(range(len(self._stand_ins))):
            part = index + 1
            following = part - 1 if index or self._is_tied else None
            with self._present(part, following=following, with_gradients=part - 1):
                self._passing.bring_gradients(part)
                for it in group:
                    given = it.inputs.pop().requires_grad_()
                    output = self._layer(index, it, given)
                    torch.autograd.backward([output], [it.hidden.to(output.dtype)])
                    it.hidden = cast(Tensor, given.grad)
                    self._add_gradients(part)
            self._send_gradients(part, measures)

    def _backward_of_embedding[Batch: TokenBatch](
        self,
        group: Sequence[_OnItsWay[Batch]],
        reader_of: Callable[[Batch], Reader],
        places: Iterable[int],
        before_micro_batch: Callable[[int], None],
        *,
        measures: bool,
    ) -> None:
        with self._present(0) if self._is_tied else nullcontext():
            self._passing.bring_gradients(0)
            for place, it in zip(places, group, strict=True):
                before_micro_batch(place)
                outputs, grads = [it.embedded], [it.hidden]
                if it.output is not None:
                    scores = _with_graph(self._scores(it, it.output, reader_of(it.batch)))
                    pairs = [pair for pair in zip(scores, it.scores_grads, strict=True) if pair[1] is not None]
                    outputs += [score for score, _ in pairs]
                    grads += [grad for _, grad in pairs]
                torch.autograd.backward(outputs, grads)
                self._add_gradients(0)
        self._send_gradients(0, measures)

    # -- parts

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
        if measures:
            self.norms |= gradient_norms(parameter for _, parameter in self._parts[index].parameters)
        self._passing.has_gradients(index)

    # -- the model's forward

    def _record[Batch: TokenBatch](self, micro_batch: Batch) -> _OnItsWay[Batch]:
        """What comes before the first layer.

        Raises:
            UnsuitedError: There is something between the layers.
        """
        batch, rows = self._built.on_device(micro_batch)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        first: list[Tensor] = []

        def record(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            first.append(hidden)
            if index != len(calls) or hidden is not first[0]:
                raise UnsuitedError("it computes something between its layers")
            if not all(_is_plain(value) for value in (*args, *kwargs.values())):
                raise UnsuitedError("its layers hand something on beside hidden states")
            calls.append((args, kwargs))
            return hidden

        self._own_forward(record, batch.input_ids, rows)
        if len(calls) != len(self._stand_ins):
            raise UnsuitedError("it does not run all of its layers")
        embedded = cast_inputs(first[0], self._dtype)
        return _OnItsWay(batch, rows, embedded, calls, embedded.detach())

    def _scores(self, it: _OnItsWay[Any], hidden: Tensor, reader: Reader) -> Any:
        """What the reader gives, from the last layer's output on."""

        def replace(_index: int, _hidden: Tensor, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Tensor:
            return hidden

        rows, reader = cast_inputs((it.rows, reader), self._dtype)
        last = self._own_forward(replace, it.batch.input_ids, rows, hidden.detach())
        return self._built.module.read(last, it.batch.input_ids, rows, reader)

    def _own_forward(self, relay: Callable[..., Tensor], *inputs: Any) -> Tensor:
        layers, self._relay = self._base._modules[self._name], relay
        self._base._modules[self._name] = self._stand_ins
        try:
            return self._built.module.hidden_states(*inputs)
        finally:
            self._base._modules[self._name] = layers
            self._relay = None

    def _passed_on(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        assert self._relay is not None
        return self._relay(index, hidden, args, kwargs)

    def _layer(self, index: int, it: _OnItsWay[Any], hidden: Tensor) -> Tensor:
        args, kwargs = cast_inputs(it.calls[index], self._dtype)
        return self._built.layers[index].forward(hidden, *args, **kwargs)

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """What is in no part is there in the compute type; embedding and output layer run as they are."""

        def cast_before(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return cast_inputs(inputs, self._dtype)

        hooks = [(module, module._forward_pre_hooks, module._forward_hooks) for module in self._hooked]
        for module in self._hooked:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict({_NO_ID: cast_before}), OrderedDict()
        try:
            with gathered(self._built.fsdp_root):
                yield
        finally:
            for module, before, after in hooks:
                module._forward_pre_hooks, module._forward_hooks = before, after


class _StandIn(nn.Module):
    """In a layer's place while the model's own forward runs; has the layer's attributes, but not its parameters."""

    def __init__(self, layer: nn.Module, index: int, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self._of = (layer,)  # in a tuple it is no part of this module
        self._index = index
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of[0], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What the relay gives."""
        return self._run(self._index, hidden, args, kwargs)


def draws_in_training(model: nn.Module, config: dict[str, Any]) -> bool:
    """Whether a training pass drops or adds anything at random, in the order of its micro-batches.

    Args:
        model: The model.
        config: The contents of its config.json.
    """
    rates = [value for name, value in config.items() if name.endswith(_DRAWS) and isinstance(value, float)]
    return any(rates) or any(isinstance(module, nn.Dropout) and module.p for module in model.modules())


def _is_of(child: nn.Module, layer: nn.Module) -> bool:
    return isinstance(child, nn.ModuleList) and len(child) > 0 and child[0] is layer


def _is_plain(value: Any) -> bool:
    """Whether a layer can leave nothing in it for the next."""
    if isinstance(value, tuple):
        return all(_is_plain(part) for part in value)
    return isinstance(value, _PLAIN) and not (isinstance(value, Tensor) and value.requires_grad)


def _with_graph(scores: Iterable[Tensor | None]) -> list[Tensor]:
    return [score for score in scores if score is not None and score.requires_grad]
