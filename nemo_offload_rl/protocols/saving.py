"""Interfaces between a backend and the code that saves checkpoints."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from nemo_offload_rl.residency import ResidencyManager, local_tensor


class StagedSave(Protocol):
    """One rank's part of a checkpoint, ready to be written."""

    def write(self) -> None:
        """Write this rank's files. Calls no collective, and may run in another thread."""
        ...

    def finish(self) -> None:
        """Complete the folder once every rank has written; may call collectives."""
        ...

    @property
    def checksums(self) -> Mapping[str, str]:
        """Checksum of each file that this rank has written, by its path in the folder; complete after `finish`."""
        ...


class HostCopies:
    """Host memory that holds a checkpoint while it is written, kept from one save to the next."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def missing_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the bytes that `copy` would have to allocate for these tensors."""
        return sum(tensor.nbytes for name, tensor in tensors.items() if self._fitting(name, tensor) is None)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` on the CPU; reuses the memory of the last copy of this name if it fits."""
        held = self._fitting(name, tensor)
        if held is None:
            held = self._tensors[name] = tensor.new_empty(tensor.shape, device="cpu")
        return held.copy_(tensor)

    def _fitting(self, name: str, tensor: Tensor) -> Tensor | None:
        held = self._tensors.get(name)
        return held if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype else None


class StateReader:
    """Reads a backend's tensors while it stages a save, wherever residency keeps them.

    Args:
        residency: Knows which tensors are on the host.

    Attributes:
        reads_host_copies: Some fetched tensor is residency's own host copy, which later changes of the state overwrite.
    """

    def __init__(self, residency: ResidencyManager) -> None:
        self._residency = residency
        self._tensors: dict[str, Tensor] = {}
        self.reads_host_copies = False

    def fetch(self, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that gives this rank's part of a tensor on the CPU.

        Moves nothing to the device: a tensor that is on the host is read from its host copy.

        Args:
            name: Unique in the checkpoint.
            tensor: A tensor, or a DTensor.
        """
        view = self._residency.host_view(tensor)
        if view is not None:
            self.reads_host_copies = True
            return lambda: view
        self._tensors[name] = local_tensor(tensor.detach())
        return lambda: self._tensors[name].cpu()

    def missing_bytes(self, copies: HostCopies) -> int:
        """Return the bytes by which `copy_to` would enlarge `copies`."""
        return copies.missing_bytes(self._tensors)

    def copy_to(self, copies: HostCopies) -> None:
        """Copy every fetched tensor that has no host copy; the fetched functions then read these copies."""
        for name, tensor in self._tensors.items():
            self._tensors[name] = copies.copy(name, tensor)
