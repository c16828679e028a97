"""Waits in vLLM's worker process for device memory that another process is still releasing.

vLLM's own wake-up does not wait: without room it fails with part of the memory mapped.
"""

import time
from collections.abc import Collection, Mapping

import torch

from nemo_offload_rl.utils.gpu_memory import holders

MARGIN_BYTES = 64 << 20  # mapping rounds sizes up
EXTRA_TIMEOUT_S = 0.25  # several GiB cross PCIe in this time
_POLL_S = 0.002


def sleeping_bytes(tags: Collection[str]) -> int:
    """Count the device memory that waking `tags` takes."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocations = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(data.handle[1] for data in allocations if data.is_asleep and data.tag in tags)


def wait_for_room(
    tags: Collection[str], timeout_s: float, process_names: Mapping[int, str], extra_bytes: int = 0
) -> bool | str:
    """Wait until the device has room to wake `tags`.

    Args:
        tags: Tags of the memory to wake.
        timeout_s: Longest wait.
        process_names: Names by process id, for the message.
        extra_bytes: Further room for other processes. The wait for it lasts at most `EXTRA_TIMEOUT_S` longer, since
            memory that they have cached does not count as free.

    Returns:
        True if there is room for `extra_bytes` too, else False; after `timeout_s`, a message that names the missing
        memory and its holders.
    """
    needed_bytes = sleeping_bytes(tags) + MARGIN_BYTES
    deadline_s = time.monotonic() + timeout_s
    extra_deadline_s: float | None = None
    while True:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        now_s = time.monotonic()
        if free_bytes >= needed_bytes:
            extra_deadline_s = extra_deadline_s or min(now_s + EXTRA_TIMEOUT_S, deadline_s)
            has_extra = free_bytes >= needed_bytes + extra_bytes
            if has_extra or now_s > extra_deadline_s:
                return has_extra
        elif now_s > deadline_s:
            break
        time.sleep(_POLL_S)
    gib = 2**30
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return (
        f"The engine's {' and '.join(tags)} need {needed_bytes / gib:.2f} GiB to wake, but {free_bytes / gib:.2f} of "
        f"{total_bytes / gib:.2f} GiB were free after {timeout_s:.0f} s; held by {holders(uuid, process_names)}; lower "
        "policy.generation.vllm_cfg.gpu_memory_utilization, or end what else runs on this GPU"
    )
