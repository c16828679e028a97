"""What a backend and the saving of checkpoints agree on."""

from __future__ import annotations

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
        """Of each file that this rank has written, by its path in the folder; complete after `finish`."""
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
        """Bytes that copies of these would take beyond what is held under their names."""
        return sum(tensor.nbytes for name, tensor in tensors.items() if self._fitting(name, tensor) is None)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the CPU, in the memory that the last copy under this name had if it fits."""
        held = self._fitting(name, tensor)
        if held is None:
            held = self._tensors[name] = tensor.new_empty(tensor.shape, device="cpu")
        return held.copy_(tensor)

    def _fitting(self, name: str, tensor: Tensor) -> Tensor | None:
        held = self._tensors.get(name)
        return held if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype else None


class StateReader:
    """What a backend reads its tensors with while it stages a save, wherever residency keeps them.

    Args:
        residency: Knows which tensors are on the host.

    Attributes:
        reads_host_copies: Something that was fetched is residency's own host copy, which later writes of the state
            overwrite.
    """

    def __init__(self, residency: ResidencyManager) -> None:
        self._residency = residency
        self._tensors: dict[str, Tensor] = {}
        self.reads_host_copies = False

    def fetch(self, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """What gives the present contents of this rank's part of a tensor, on the CPU.

        Nothing is brought to the device for it: where a group is on the host, its host copy is read.

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
        """Bytes that `copies` would grow by in `copy_to`."""
        return copies.missing_bytes(self._tensors)

    def copy_to(self, copies: HostCopies) -> None:
        """Copy what residency has no host copy of: from now on, that is read in the place of the tensors."""
        for name, tensor in self._tensors.items():
            self._tensors[name] = copies.copy(name, tensor)
