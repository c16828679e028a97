"""The protocol of a training backend's section of the YAML. Loads neither torch nor a model library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self


@dataclass(frozen=True)
class ModelParallel:
    """Over how many ranks one copy of the model is spread, and how ranks are numbered.

    Numbers of tensor-parallel ranks are neighbours; context-, data- and pipeline-parallel ones follow in this order.
    """

    tensor: int
    context: int = 1
    pipeline: int = 1

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that share one shard of the data."""
        return self.tensor * self.context * self.pipeline

    def data_parallel_rank(self, rank: int, world_size: int) -> int:
        """Which shard of the data a rank gets."""
        return rank % (world_size // self.pipeline) // (self.tensor * self.context)


class BackendConfig(Protocol):
    """A section `policy.*_cfg`. Exactly one of them is enabled."""

    @property
    def enabled(self) -> bool:
        """Whether this backend trains the model."""
        ...

    @property
    def section(self) -> str:
        """Name of the section in `policy`."""
        ...

    @property
    def streaming_section(self) -> str:
        """Dotted name of the section with `offload_optimizer_states`, for messages."""
        ...

    @property
    def activation_key(self) -> str:
        """Dotted name of the key that offloads activations, for messages."""
        ...

    @property
    def activation_checkpointing(self) -> bool:
        """Tell whether layers are computed again in the backward pass."""
        ...

    @property
    def streamed_share(self) -> float:
        """Share of the optimizer states that are on the device in the optimizer step only; 0 for none."""
        ...

    @property
    def streams_parameters(self) -> bool:
        """Whether parameters and gradients are on the device a part at a time too."""
        ...

    @property
    def streams_in_parts(self) -> bool:
        """Whether that happens part after part, so that never all of them are there."""
        ...

    @property
    def keeps_optimizer_on_host(self) -> bool:
        """Whether all of the optimizer lives on the host and computes its update there."""
        ...

    @property
    def model_parallel(self) -> ModelParallel:
        """Over how many ranks a model is spread."""
        ...

    @property
    def worker_env_vars(self) -> Mapping[str, str]:
        """Environment variables that a worker has before anything is imported there."""
        ...

    def without_streaming(self) -> Self:
        """The same with `offload_optimizer_states` false."""
        ...
