"""Reading a tensor where it is: the host copies of groups that are away from the device."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from nemo_offload_rl.residency.group_state import GroupState
from nemo_offload_rl.residency.plan import Placement
from nemo_offload_rl.residency.storage import local_tensor, storage_key


def host_view(states: Iterable[GroupState], tensor: Tensor) -> Tensor | None:
    """A tensor's contents in its group's host copy; None where they are on the device.

    The result has the tensor's shape and strides, and shares the host copy's memory.
    """
    local = local_tensor(tensor.detach())
    key = storage_key(local.untyped_storage())
    for state in states:
        if state.location is Placement.HOST and state.mirror.has(key):
            state.settle()
            flat = state.mirror.bytes_of(key).view(local.dtype)
            # An offset of `as_strided` counts from the start of the block that the host copy is a part of.
            return flat.as_strided(local.size(), local.stride(), flat.storage_offset() + local.storage_offset())
    return None
