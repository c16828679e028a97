"""Megatron-core's fine-grained activation offloading, adapted to reinforcement learning.

Megatron-core 0.19.2 (pipeline_parallel/fine_grained_activation_offload.py) records in its first pass, the warm-up,
which tensors to move, and never updates that record. This fails in a policy worker in three ways:

1. The first pass often computes logprobs and keeps no activations. Training then moves only a small part of its
   activations, without an error. `forward_only` hides such passes from the warm-up.
2. If a pass has more micro-batches than the warm-up, the additional ones are not offloaded. The number varies if
   micro-batches are formed by tokens; `training_pass` warms up again when it grows.
3. Megatron-core keeps a host buffer for each exact shape. `HostBufferPool` replaces these buffers.

A pass that raises leaves the offload manager in an unfinished state; `training_pass` then creates a new one.
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

_SPARE = 1.5  # margin for adapters, padding, and tensors of Transformer Engine that are not listed here
_ATTRIBUTES = {"core_attn": "core_attention"}  # module names that differ from Megatron's attribute names


class ActivationOffloading:
    """Guard around `get_forward_backward_func()`; does nothing if no configuration offloads activations.

    Args:
        configs: `TransformerConfig` of every model chunk of this rank; an object may occur more than once.
        host_limit_bytes: See `HostBufferPool`.
        device: Device of the model.
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
        """True if activations are offloaded."""
        return bool(self._configs)

    @property
    def host_bytes(self) -> int:
        """Size of the host buffers."""
        return self._pool.total_bytes if self._pool is not None else 0

    @contextmanager
    def training_pass(self, num_micro_batches: int) -> Iterator[None]:
        """Wrap a forward and backward pass.

        Megatron-core warms up in the first pass and in each pass with more micro-batches than any before it. The
        warm-up gathers over all ranks, so they need the same number of micro-batches, and prints a table.
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
        """Wrap a pass without a backward pass: logprobs, evaluation, the reference. May be nested."""
        configs = [config for config in self._configs if config.fine_grained_activation_offloading]
        if not configs:
            yield
            return
        manager = _manager_class().OFFLOAD_MGR
        # The cleared flag stops the pass from opening chunks and ending a warm-up; layers ask the manager instead.
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
        """Release the host memory; the next training pass allocates it again."""
        if self._pool is not None:
            self._start_afresh()
            self._warm_micro_batches = 0
            self._pool.clear()

    def _start_afresh(self) -> None:
        """Create a manager that warms up in the next pass and uses the same host memory."""
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
    """Refuse to offload activations if Transformer Engine is missing or would also move weights.

    Raises:
        ConfigError: Transformer Engine is missing, or this process started without `NVTE_CPU_OFFLOAD_V1=1`.
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
    """Estimate the most host memory that offloaded activations need, from tokens and layers; at most the limit.

    Activations of experts do not pass through the buffers and are not counted.

    Args:
        config: The model's `TransformerConfig`.
        num_layers: Number of layers on this rank.
        settings: The policy's settings, for the tokens of a micro-batch.
        cfg: The Megatron backend's settings, for modules, parallelism and the limit.
    """
    limit_bytes = int(cfg.activation_offload_host_limit_gib * 2**30)
    if settings.precision == "float32":  # attention then keeps a matrix of scores
        return limit_bytes
    tokens = settings.most_train_tokens / cfg.context_parallel_size
    tensors = [
        round_up(2 * math.ceil(tokens * elements))  # 16-bit numbers
        for module in cfg.offload_modules or ()
        for elements in elements_a_token(config, module, cfg)
    ]
    layers = math.ceil(cfg.activation_offload_fraction * num_layers)
    # The first pipeline stage holds the activations of as many micro-batches as there are stages.
    return min(limit_bytes, int(_SPARE * cfg.pipeline_model_parallel_size * layers * sum(tensors)))


def elements_a_token(config: Any, module: str, cfg: MegatronConfig) -> tuple[float, ...]:
    """Return the elements per token of each tensor that a module of one layer keeps for its backward pass."""
    tp_size = cfg.tensor_model_parallel_size
    hidden = config.hidden_size / (tp_size if cfg.sequence_parallel else 1)
    queries = config.num_attention_heads * config.kv_channels / tp_size
    keys = config.num_query_groups * config.kv_channels / tp_size
    softmax = 2 * config.num_attention_heads / tp_size  # float32
    return {
        "attn_norm": (hidden,),
        "qkv_linear": (hidden, hidden, queries, keys),  # input and output of its norm, inputs of Qwen3's norms
        "core_attn": (queries, keys, keys, queries, softmax),  # includes its output
        "attn_proj": (queries,),
        "mlp_norm": (hidden,),
    }.get(module, ())


def check_modules(chunks: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Refuse names of `policy.megatron_cfg.offload_modules` that match no module of the model.

    Raises:
        ConfigError: A name has no match: a dense model has no experts, and a norm may be fused into the next product.
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
    # Imported late: importing megatron takes seconds.
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    return PipelineOffloadManager
