"""How a pass goes over its micro-batches: one after the other, or with `cpu_offload` layer by layer where it can."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nemo_offload_rl.backends.dtensor.built import BuiltModel
from nemo_offload_rl.backends.dtensor.host_held.layerwise import LayerwisePasses, LossOf, ReaderOf
from nemo_offload_rl.backends.dtensor.host_held.parts import PassHooks
from nemo_offload_rl.backends.dtensor.host_held.stand_ins import draws_in_training
from nemo_offload_rl.backends.dtensor.parallel import drop_unreduced_grads
from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.keys.dtensor import DTensorConfig
from nemo_offload_rl.residency import DeviceOutOfMemoryError, PassingParts

logger = logging.getLogger(__name__)


class PassOrder:
    """Passes over micro-batches.

    Args:
        built: The model.
        cfg: How it is trained.

    Attributes:
        norms: Of each gradient that is away after a training pass, a 0-dim tensor on the device.
        reads_layerwise: Passes without backward go by `read`; else each micro-batch in a `reading`.
        trains_layerwise: Training passes go by `train`; else each micro-batch in a `training`.
    """

    def __init__(self, built: BuiltModel, cfg: DTensorConfig) -> None:
        self.norms: Mapping[nn.Parameter, Tensor] = {}
        self._built = built
        self._cfg = cfg
        self._hooks: PassHooks | None = None
        self._layerwise: LayerwisePasses | None = None
        self.reads_layerwise = self.trains_layerwise = False

    def use_parts(self, passing: PassingParts) -> None:
        """From now on the model's parts come and go; layer by layer where nothing is in the way.

        With backward that takes a model that draws no random numbers, whose layers are computed again anyway.
        """
        self._hooks = PassHooks(self._built.parts, passing)
        layerwise = LayerwisePasses(self._built, passing)
        tokens = TokenBatch(input_ids=torch.zeros(1, 2, dtype=torch.int64), input_lengths=torch.tensor([2]))
        if (reason := layerwise.unsuited(tokens)) is not None:
            logger.warning(
                "policy.dtensor_cfg.cpu_offload: the model does not run layer by layer, since %s; its weights cross to "
                "the device once for every micro-batch.",
                reason,
            )
            return
        self._layerwise, self.reads_layerwise = layerwise, True
        recomputes = self._cfg.activation_checkpointing and not self._cfg.activation_offload
        config = self._built.module.causal_lm.config.to_dict()
        self.trains_layerwise = recomputes and not draws_in_training(self._built.module, config)
        if not self.trains_layerwise:
            logger.info(
                "policy.dtensor_cfg.cpu_offload: in training, weights and gradients cross once for every micro-batch. "
                "They cross once for many with activation_checkpointing true, activation_offload false and no dropout."
            )

    def reading(self) -> AbstractContextManager[None]:
        """The pass of a micro-batch without backward."""
        return nullcontext() if self._hooks is None else self._hooks.reading()

    @contextmanager
    def training(self, *, is_last: bool) -> Iterator[None]:
        """Forward and backward of a micro-batch.

        Args:
            is_last: Of the global batch.
        """
        if self._hooks is None:
            if self._built.rank_info.world_size == 1:
                # One rank's whole gradients take no more memory than its part of them: they are "reduced" once, at the
                # end. With more ranks they would.
                self._built.fsdp_root.set_requires_gradient_sync(is_last)
            yield
            return
        with self._hooks.training(measures=is_last):
            yield
        if is_last:
            self.norms = self._hooks.norms

    def read[Batch: TokenBatch](
        self, micro_batches: Sequence[Batch], reader_of: ReaderOf[Batch]
    ) -> list[tuple[Any, Batch]]:
        """Read all micro-batches layer by layer: what the reader gives of each, and the micro-batch on the device."""
        layerwise = self._layerwise
        assert layerwise is not None
        return self._in_groups(lambda: layerwise.read(micro_batches, reader_of))

    def train[Batch: TokenBatch](
        self,
        micro_batches: Sequence[Batch],
        reader_of: ReaderOf[Batch],
        loss_of: LossOf[Batch],
        before_micro_batch: Callable[[int], None],
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Add the gradients of all micro-batches layer by layer; gives the loss and metrics of each."""
        layerwise = self._layerwise
        assert layerwise is not None
        found = self._in_groups(
            lambda: layerwise.train(micro_batches, reader_of, loss_of, before_micro_batch), after_failure=self.drop
        )
        self.norms = layerwise.norms
        return found

    def _in_groups[Result](self, run: Callable[[], Result], after_failure: Callable[[], None] | None = None) -> Result:
        """A pass layer by layer; where memory runs out, once more in smaller groups of micro-batches."""
        while True:
            try:
                return run()
            except (torch.OutOfMemoryError, DeviceOutOfMemoryError) as error:
                if self._layerwise is None or not self._layerwise.make_groups_smaller():
                    raise
                logger.info(
                    "Out of memory (%s); micro-batches pass in smaller groups.", str(error).split("\n")[0][:200]
                )
            # Outside of the handler: the error's traceback holds the failed pass's tensors.
            gc.collect()
            self._built.reshard()
            if after_failure is not None:
                after_failure()

    def drop(self) -> None:
        """Forget gradients and gathered parameters."""
        self._built.reshard()
        drop_unreduced_grads(self._built.fsdp_root)
        if self._hooks is not None:
            self._hooks.drop()
        for _, parameter in self._built.parameters:
            parameter.grad = None
        self.norms = {}
