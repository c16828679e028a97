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
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nemo_offload_rl.backends.megatron.host_buffers import HostBufferPool, round_up
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.residency import new_region_on

logger = logging.getLogger(__name__)

_SPARE = 1.5  # for adapters, padding, and whatever else Transformer Engine may keep beside what is listed here
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


def host_bytes_at_most(config: Any, num_layers: int, settings: PolicySettings, cfg: MegatronConfig) -> int:
    """Host memory that offloaded activations can need: by tokens and layers, or the limit where that is less.

    Activations of experts, which do not go through the buffers, are not counted.

    Args:
        config: The model's `TransformerConfig`.
        num_layers: Layers of this rank.
        settings: The policy's settings: tokens of a micro-batch.
        cfg: The Megatron backend's settings: modules, parallelism, the limit.
    """
    limit_bytes = int(cfg.activation_offload_host_limit_gib * 2**30)
    if settings.precision == "float32":  # attention that keeps a matrix of scores
        return limit_bytes
    tokens = settings.most_train_tokens / cfg.context_parallel_size
    tensors = [
        round_up(2 * math.ceil(tokens * elements))  # 16-bit numbers
        for module in cfg.offload_modules or ()
        for elements in elements_a_token(config, module, cfg)
    ]
    layers = math.ceil(cfg.activation_offload_fraction * num_layers)
    # The first stage of a pipeline has as many micro-batches under way as there are stages.
    return min(limit_bytes, int(_SPARE * cfg.pipeline_model_parallel_size * layers * sum(tensors)))


def elements_a_token(config: Any, module: str, cfg: MegatronConfig) -> tuple[float, ...]:
    """Of each tensor that a module of one layer keeps for its backward pass: elements for each token."""
    tp_size = cfg.tensor_model_parallel_size
    hidden = config.hidden_size / (tp_size if cfg.sequence_parallel else 1)
    queries = config.num_attention_heads * config.kv_channels / tp_size
    keys = config.num_query_groups * config.kv_channels / tp_size
    softmax = 2 * config.num_attention_heads / tp_size  # float32
    return {
        "attn_norm": (hidden,),
        "qkv_linear": (hidden, hidden, queries, keys),  # its norm's input and output, and what the norms of Qwen3 take
        "core_attn": (queries, keys, keys, queries, softmax),  # its output is kept too
        "attn_proj": (queries,),
        "mlp_norm": (hidden,),
    }.get(module, ())


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
