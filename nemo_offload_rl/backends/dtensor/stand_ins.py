"""Runs a Hugging Face model's layers one by one, without taking the model apart.

The model's own forward runs with stand-ins in place of its layers. They record each layer's arguments (rotary angles,
masks), or return the last layer's output, from which the model's forward continues.

FSDP's hooks do not run: the caller has gathered the parameters.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nemo_offload_rl.backends.dtensor.built import BuiltModel
from nemo_offload_rl.backends.dtensor.model import ModelRows
from nemo_offload_rl.backends.dtensor.parallel import cast_inputs
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.protocols.scoring import Reader

_PLAIN = (Tensor, bool, int, float, str, torch.dtype, type(None))
_NO_ID = -1  # ids of torch's hooks begin at 0


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a model's layers for a micro-batch.

    Attributes:
        hidden: [R, L, H] input of the first layer, with its autograd graph.
        others: Other arguments of each layer.
        experts_TDK: Routing of the tokens, see `ModelRows`.
    """

    hidden: Tensor
    others: list[tuple[tuple[Any, ...], dict[str, Any]]]
    experts_TDK: Tensor | None = None

    def others_bytes(self) -> int:
        """Return the bytes of the other arguments, counting tensors that layers share once."""
        storages = {it.untyped_storage() for it in tree_leaves(self.others) if isinstance(it, Tensor)}
        return sum(storage.nbytes() for storage in storages)


class SteppedModel:
    """Runs the model's forward one layer at a time."""

    def __init__(self, built: BuiltModel) -> None:
        self._module = built.module
        self._layers = built.layers
        self._dtype = built.compute_dtype
        self._base: nn.Module = built.module.causal_lm.base_model
        self._name = next(name for name, child in self._base.named_children() if _is_of(child, built.layers[0]))
        self._relay: Callable[..., Tensor] | None = None
        self._stand_ins = nn.ModuleList(
            _StandIn(layer, index, self._pass_on) for index, layer in enumerate(self._layers)
        )

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Within the context, embedding and output layer run without hooks, except for a cast of their inputs."""

        def cast_before(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return cast_inputs(inputs, self._dtype)

        modules = (self._module.causal_lm.get_input_embeddings(), self._module.scorer)
        hooks = [(module._forward_pre_hooks, module._forward_hooks) for module in modules]
        for module in modules:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict({_NO_ID: cast_before}), OrderedDict()
        try:
            yield
        finally:
            for module, (before, after) in zip(modules, hooks, strict=True):
                module._forward_pre_hooks, module._forward_hooks = before, after

    def embed(self, input_ids_BS: Tensor, rows: ModelRows) -> LayerInputs:
        """Compute the inputs of the first layer.

        Raises:
            ConfigError: Layers cannot run one by one.
        """
        hidden: list[Tensor] = []
        others: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def record(index: int, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            hidden.append(given)
            if index != len(others) or given is not hidden[0]:
                raise unsuited("it computes something between its layers")
            if not all(_is_plain(value) for value in (*args, *kwargs.values())):
                raise unsuited("its layers pass on more than hidden states")
            others.append((args, kwargs))
            return given

        self._run(record, input_ids_BS, rows)
        if len(others) != len(self._layers):
            raise unsuited("it does not run all of its layers")
        return LayerInputs(cast_inputs(hidden[0], self._dtype), others, rows.experts_TDK)

    def layer(self, index: int, hidden: Tensor, inputs: LayerInputs) -> Tensor:
        """Compute a layer's output for hidden states in the compute type."""
        args, kwargs = cast_inputs(inputs.others[index], self._dtype)
        self._module.replay(inputs.experts_TDK)
        return self._layers[index].forward(hidden, *args, **kwargs)

    def read(self, hidden: Tensor, input_ids_BS: Tensor, rows: ModelRows, reader: Reader) -> Any:
        """Apply the reader to the scored tokens, given the last layer's output."""

        def give_output(*_: Any) -> Tensor:
            return hidden

        rows, reader = cast_inputs((rows, reader), self._dtype)
        last = self._run(give_output, input_ids_BS, rows, hidden.detach())
        return self._module.read(last, input_ids_BS, rows, reader)

    def _run(self, relay: Callable[..., Tensor], *inputs: Any) -> Tensor:
        layers, self._relay = self._base._modules[self._name], relay
        self._base._modules[self._name] = self._stand_ins
        try:
            return self._base(**self._module.inputs(*inputs)).last_hidden_state
        finally:
            self._base._modules[self._name] = layers
            self._relay = None

    def _pass_on(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        assert self._relay is not None
        return self._relay(index, hidden, args, kwargs)


class _StandIn(nn.Module):
    """Replaces a layer while the model's own forward runs; it has the layer's attributes, but not its parameters."""

    def __init__(self, layer: nn.Module, index: int, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self._of = (layer,)  # in a tuple, so that it is no submodule
        self._index = index
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of[0], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Call the relay."""
        return self._run(self._index, hidden, args, kwargs)


def unsuited(reason: str) -> ConfigError:
    """Make the error that refuses a model whose layers cannot run one by one."""
    return ConfigError(
        f"policy.dtensor_cfg.cpu_offload is true, but the model cannot run layer by layer: {reason}; set it to false"
    )


def _is_of(child: nn.Module, layer: nn.Module) -> bool:
    return isinstance(child, nn.ModuleList) and len(child) > 0 and child[0] is layer


def _is_plain(value: Any) -> bool:
    """Tell whether a layer's argument is plain data that carries no gradient."""
    if isinstance(value, tuple):
        return all(_is_plain(part) for part in value)
    return isinstance(value, _PLAIN) and not (isinstance(value, Tensor) and value.requires_grad)
