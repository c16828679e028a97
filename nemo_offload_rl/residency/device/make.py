"""Makes the residency device of a torch device."""

from __future__ import annotations

import torch

from nemo_offload_rl.residency.device.device import CpuDevice, Device


def make_device(device: torch.device) -> Device:
    """The residency device for a torch device."""
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        from nemo_offload_rl.residency.device.cuda import CudaDevice

        return CudaDevice(device)
    raise NotImplementedError(f"no residency device for {device.type!r}")
