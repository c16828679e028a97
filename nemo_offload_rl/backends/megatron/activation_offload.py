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

import importlib
import logging
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.residency import new_region_on
from nemo_offload_rl.residency.host.regions import HostRegion
from nemo_offload_rl.residency.table.errors import ResidencyError

logger = logging.getLogger(__name__)

ROUND_BYTES = 2 << 20  # a huge page, the smallest pinned region
MAX_WASTE = 1.5  # largest size of a buffer relative to the request that it serves
_SPARE = 1.5  # margin for adapters, padding, and tensors of Transformer Engine that are not listed here
_ATTRIBUTES = {"core_attn": "core_attention"}  # module names that differ from Megatron's attribute names


@dataclass(eq=False)
class _Buffer:
    region: HostRegion
    num_bytes: int
    last_pass: int


def round_up(num_bytes: int) -> int:
    """Return the size of the buffer for a request of `num_bytes`."""
    return max(1, -(-num_bytes // ROUND_BYTES)) * ROUND_BYTES


class HostBufferPool:
    """Pool of host tensors of any shape; has the methods of megatron-core's `OffloadTensorPool` (0.19.2).

    Megatron-core's pool keeps a pinned buffer for each exact shape, so it only grows: reinforcement learning has new
    shapes in each batch. Here a buffer serves any tensor that fits, and above a limit the least recently used are
    released. It is apart from residency's `HostArena`, which refuses what exceeds its limit and keeps its memory:
    Megatron needs a buffer for every tensor, so a pass may exceed this pool's limit, and memory is returned afterwards.

    Args:
        limit_bytes: Most memory that is kept between passes. A pass exceeds it, with one warning, only if no free
            buffer is large enough.
        new_region: Allocates host memory of a size.
        synchronize: Waits for running copies. It is called before memory is released, since Megatron calls `free` when
            a copy back starts, not when it ends.
    """

    def __init__(
        self, limit_bytes: int, new_region: Callable[[int], HostRegion], synchronize: Callable[[], None]
    ) -> None:
        self.limit_bytes = limit_bytes
        self._new_region = new_region
        self._synchronize = synchronize
        self._free: list[_Buffer] = []  # sorted by size
        self._in_use: dict[int, _Buffer] = {}  # by address
        self._pass = 0
        self._has_warned = False
        self.total_bytes = 0
        self.num_regions_made = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a host tensor with arbitrary contents."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        buffer = self._take_free(num_bytes) or self._make(num_bytes)
        buffer.last_pass = self._pass
        tensor = buffer.region.buffer[:num_bytes].view(dtype).view(tuple(shape))
        self._in_use[tensor.data_ptr()] = buffer
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Take back a tensor of `allocate`.

        Raises:
            ResidencyError: The tensor is not in use.
        """
        buffer = self._in_use.pop(tensor.data_ptr(), None)
        if buffer is None:
            raise ResidencyError("an activation's host buffer was freed twice or belongs to another pool")
        insort(self._free, buffer, key=_size)

    def reset(self) -> None:
        """End a pass: mark all buffers as free and release those above the limit."""
        for buffer in self._in_use.values():
            insort(self._free, buffer, key=_size)
        self._in_use.clear()
        self._pass += 1
        self._release_down_to(self.limit_bytes)

    def clear(self) -> None:
        """Release everything."""
        self.reset()
        self._release_down_to(0)

    def _take_free(self, num_bytes: int) -> _Buffer | None:
        index = bisect_left(self._free, num_bytes, key=_size)
        if index == len(self._free):
            return None
        fits = self._free[index].num_bytes <= max(MAX_WASTE * num_bytes, ROUND_BYTES)
        # At the limit a far too large buffer is better than a new one in each pass.
        is_full = self.total_bytes + round_up(num_bytes) > self.limit_bytes
        return self._free.pop(index) if fits or is_full else None

    def _make(self, num_bytes: int) -> _Buffer:
        num_bytes = round_up(num_bytes)
        self._release_down_to(self.limit_bytes - num_bytes)
        self.total_bytes += num_bytes
        self.num_regions_made += 1
        if self.total_bytes > self.limit_bytes and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Offloaded activations need more than %.2f GiB of host memory, so some buffers are made anew in every "
                "pass. The limit is the lower of policy.megatron_cfg.activation_offload_host_limit_gib, which you may "
                "raise, "
                "and an estimate from tokens and layers.",
                self.limit_bytes / 2**30,
            )
        return _Buffer(self._new_region(num_bytes), num_bytes, self._pass)

    def _release_down_to(self, target_bytes: int) -> None:
        """Close free buffers, least recently used first, until the rest takes at most `target_bytes`."""
        if self.total_bytes <= target_bytes or not self._free:
            return
        self._synchronize()
        for buffer in sorted(self._free, key=lambda buffer: buffer.last_pass):
            if self.total_bytes <= target_bytes:
                break
            self._free.remove(buffer)
            self.total_bytes -= buffer.num_bytes
            buffer.region.close()


def _size(buffer: _Buffer) -> int:
    return buffer.num_bytes


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
            f"policy.megatron_cfg.offload_modules has {' and '.join(missing)}, but no layer of this model has a "
            "module of that name to offload (norms may be computed inside the product after them); remove it"
        )


def _manager_class() -> Any:
    # Imported late: importing megatron takes seconds.
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    return PipelineOffloadManager
