"""Megatron-core's fine-grained activation offloading, made fit for reinforcement learning.

Megatron-core 0.19.2 (pipeline_parallel/fine_grained_activation_offload.py) learns in its first pass, the warm-up, which
tensors there are to move, and keeps to that for ever. Three things go wrong with that in a policy worker:

1. The first pass is often one of logprobs, which keeps no activations: from then on training moves a small part of what
   it should, without an error. `forward_only` keeps such passes away from it.
2. Micro-batches beyond the number that the warm-up had are not offloaded at all. Where micro-batches are made by tokens
   that number changes; `training_pass` warms up again when it grows.
3. Its host buffers are kept by exact shape. `HostBufferPool` takes their place.

A pass that raised leaves it in the middle of its lists; `training_pass` starts it afresh.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.backends.megatron.host_buffers import HostBufferPool, new_region_on

logger = logging.getLogger(__name__)

_ATTRIBUTES = {"core_attn": "core_attention"}  # where Megatron's attribute is not called as its module


class ActivationOffloading:
    """The guard around `get_forward_backward_func()`; does nothing where the configurations do not offload.

    Args:
        configs: `TransformerConfig` of every model chunk of this rank; the same object may come twice.
        host_limit_bytes: See `HostBufferPool`.
        device: Where the model computes.
    """

    def __init__(self, configs: Sequence[Any], host_limit_bytes: int, device: torch.device) -> None:
        unique = {id(config): config for config in configs}
        self._configs = [config for config in unique.values() if config.fine_grained_activation_offloading]
        self._device = device
        self._host_limit_bytes = host_limit_bytes
        self._pool: HostBufferPool | None = None
        self._warm_micro_batches = 0

    @property
    def is_enabled(self) -> bool:
        """True where activations are offloaded."""
        return bool(self._configs)

    @property
    def host_bytes(self) -> int:
        """Host memory that the buffers take."""
        return self._pool.total_bytes if self._pool is not None else 0

    @contextmanager
    def training_pass(self, num_micro_batches: int) -> Iterator[None]:
        """Around a forward and backward pass.

        The first one, and one with more micro-batches than any before, tells megatron-core what there is to move: it
        gathers over all ranks, which therefore need the same number of micro-batches, and prints a table.
        """
        if not self.is_enabled:
            yield
            return
        if num_micro_batches > self._warm_micro_batches:
            self._start_afresh()
            self._warm_micro_batches = num_micro_batches
        try:
            yield
        except BaseException:
            self._warm_micro_batches = 0
            raise

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """Around a pass without a backward pass: logprobs, evaluation, the reference. May be nested."""
        configs = [config for config in self._configs if config.fine_grained_activation_offloading]
        if not configs:
            yield
            return
        manager = _manager_class().OFFLOAD_MGR
        # The flag keeps the pass from opening chunks and from ending a warm-up; layers ask the manager instead.
        for config in configs:
            config.fine_grained_activation_offloading = False
        if manager is not None:
            manager.disable_offload()
        try:
            yield
        finally:
            for config in configs:
                config.fine_grained_activation_offloading = True
            if manager is not None:
                manager.enable_offload()

    def close(self) -> None:
        """Give the host memory back; the next training pass takes it again."""
        if self._pool is not None:
            self._start_afresh()
            self._warm_micro_batches = 0
            self._pool.clear()

    def _start_afresh(self) -> None:
        """A new manager, which warms up in the next pass, over the same host memory."""
        self._synchronize()
        if self._pool is None:
            self._pool = HostBufferPool(self._host_limit_bytes, new_region_on(self._device), self._synchronize)
        manager_class = _manager_class()
        manager_class.reset_instance()
        manager_class.OFFLOAD_MGR._cpu_tensor_pool = self._pool
        self._pool.reset()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def check_transformer_engine() -> None:
    """Refuse to offload activations where Transformer Engine cannot or would move weights too.

    Raises:
        ConfigError: Transformer Engine is missing, or its process started without `NVTE_CPU_OFFLOAD_V1=1`.
    """
    key = "policy.megatron_cfg.fine_grained_activation_offloading"
    try:
        cpu_offload = importlib.import_module("transformer_engine.pytorch.cpu_offload")
    except ImportError as error:
        raise ConfigError(
            f"{key} is true, but Transformer Engine is not installed; install it, or set false"
        ) from error
    if not cpu_offload.NVTE_CPU_OFFLOAD_V1:
        raise ConfigError(
            f"{key} is true, but this process began without NVTE_CPU_OFFLOAD_V1=1, without which Transformer Engine "
            "moves weights too; set the variable before Python starts (policy workers under Ray get it)"
        )


def check_modules(chunks: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Refuse names of `policy.megatron_cfg.offload_modules` that stand for nothing in the model.

    Raises:
        ConfigError: A dense model has no experts; a norm may be fused into the product behind it.
    """
    found = {
        name
        for chunk in chunks
        for module in chunk.modules()
        for name in names
        if vars(module).get(f"offload_{_ATTRIBUTES.get(name, name)}") is True
    }
    if missing := [name for name in names if name not in found]:
        raise ConfigError(
            f"policy.megatron_cfg.offload_modules has {' and '.join(missing)}, but no layer of this model has such "
            "activations by themselves (norms are fused into the product behind them); remove it"
        )


def _manager_class() -> Any:
    # Here, since megatron takes seconds to import.
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    return PipelineOffloadManager
