"""A teacher on the DTensor backend: a model that is never trained."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nemo_offload_rl.backends.dtensor.built import BuiltModel
from nemo_offload_rl.backends.dtensor.parallel import full_tensor
from nemo_offload_rl.backends.hf.model_folder import check_model_folder
from nemo_offload_rl.backends.ranks import max_over_ranks
from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES, ProcessInfo
from nemo_offload_rl.protocols.scoring import Reader
from nemo_offload_rl.residency import TEACHER, TEACHER_LAYER, StateGroup


class FrozenDTensor:
    """A `FrozenModel` whose parameters have the type of `precision`.

    Args:
        settings: The teacher's settings, in the form of a policy's.
        process: This rank; the process group must exist.
        streams_layers: Make each decoder layer a state group that is on the device only for the layer's forward.
    """

    def __init__(self, settings: PolicySettings, process: ProcessInfo, *, streams_layers: bool = False) -> None:
        check_model_folder(settings.model_name)
        self._dtype = COMPUTE_DTYPES[settings.precision]
        self._device = torch.device(process.device)
        self._built = BuiltModel(settings, process, is_frozen=True)
        self.rank_info = self._built.rank_info
        self.temperature, self.softcap = self._built.head.temperature, self._built.head.softcap
        self._streams_layers = streams_layers
        self._streamed_layers: Callable[[], Iterator[str]] = lambda: iter(())
        self._coming: Iterator[str] = iter(())
        if streams_layers:
            for layer in self._built.layers:
                layer.register_forward_pre_hook(self._bring, prepend=True)  # before FSDP's own

    def state_groups(self) -> Sequence[StateGroup]:
        """Return one group that arrives layer by layer or, with streamed layers, one per layer and one of the rest."""

        def everything() -> Iterator[tuple[str, Tensor]]:
            yield from self._built.parameters
            yield from self._built.module.named_buffers()

        if not self._streams_layers:
            return (self._built.group(TEACHER, everything),)

        def of_layer(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
            yield from layer.named_parameters()
            yield from layer.named_buffers()

        def rest() -> Iterator[tuple[str, Tensor]]:
            in_layers = {id(tensor) for layer in self._built.layers for _, tensor in of_layer(layer)}
            yield from ((name, tensor) for name, tensor in everything() if id(tensor) not in in_layers)

        layers = [
            StateGroup(f"{TEACHER_LAYER}.{index}", lambda layer=layer: of_layer(layer), prepare=self._built.reshard)
            for index, layer in enumerate(self._built.layers)
        ]
        return (StateGroup(TEACHER, rest, prepare=self._built.reshard), *layers)

    def use_stream(self, streamed_layers: Callable[[], Iterator[str]]) -> None:
        self._streamed_layers = streamed_layers

    def read(self, micro_batches: Sequence[TokenBatch], reader: Reader) -> list[Any]:
        """See `FrozenModel`; streamed layers all come once for each micro-batch."""
        found: list[Any] = []
        with self._built.reading():
            for micro_batch in micro_batches:
                with self._pass():
                    batch, rows = self._built.on_device(micro_batch)
                    found.append(self._built.module(batch.input_ids, rows, reader))
        # At the end, since each copy waits for the device.
        return [type(it)(*(None if value is None else value.cpu() for value in it)) for it in found]

    def abandon_pass(self) -> None:
        self._built.abandon_pass()

    @contextmanager
    def _pass(self) -> Iterator[None]:
        self._coming = self._streamed_layers()
        yield
        for name in self._coming:  # the last layer leaves
            raise RuntimeError(f"the forward pass of the teacher went on without {name}")

    def _bring(self, layer: nn.Module, _inputs: Any) -> None:
        next(self._coming)
        if self._built.gather is not None:
            self._built.gather(layer)

    def output_rows(self, first: int, count: int) -> Tensor:
        weight: Any = self._built.module.causal_lm.get_output_embeddings().weight
        return full_tensor(weight, self._dtype)[first : first + count].clone()

    def all_reduce_max(self, value: int) -> int:
        return max_over_ranks(value, self._built.dp_group, self._device)

    def close(self) -> None:
        """Do nothing: the process group is the policy's."""
