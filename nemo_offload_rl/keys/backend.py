"""The protocol of a training backend's section of the YAML. Imports neither torch nor a model library."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self


@dataclass(frozen=True)
class ModelParallel:
    """Numbers of ranks that share one copy of the model, and the order of ranks.

    From the innermost to the outermost dimension, ranks are tensor-, context-, data- and pipeline-parallel.
    """

    tensor: int
    context: int = 1
    pipeline: int = 1

    @property
    def ranks_per_copy(self) -> int:
        """Number of ranks that hold one copy of the model, and share one shard of the data."""
        return self.tensor * self.context * self.pipeline

    def data_parallel_rank(self, rank: int, world_size: int) -> int:
        """Return the number of the data shard that a rank gets."""
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
        """Whether backward passes recompute layers."""
        ...

    @property
    def streamed_share(self) -> float:
        """Share of the optimizer states that are on the device only during the optimizer step; 0 for none."""
        ...

    @property
    def streams_parameters(self) -> bool:
        """Whether parameters and gradients, too, are on the device only part by part."""
        ...

    @property
    def streams_in_parts(self) -> bool:
        """Whether states are streamed in parts, so that the device never holds all of them."""
        ...

    @property
    def keeps_optimizer_on_host(self) -> bool:
        """Whether the whole optimizer stays on the host and updates there."""
        ...

    @property
    def model_parallel(self) -> ModelParallel:
        """Ranks that share one copy of the model."""
        ...

    @property
    def worker_env_vars(self) -> Mapping[str, str]:
        """Environment variables to set in a worker before it imports anything."""
        ...

    def without_streaming(self) -> Self:
        """Copy the section with `offload_optimizer_states` false."""
        ...
