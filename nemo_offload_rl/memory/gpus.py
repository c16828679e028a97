"""Known GPUs: memory, and rates that runs reached on them; and memory that stays on any GPU when state leaves.

`python -m nemo_offload_rl.plan --calibrate FILE` measures the rates of the present machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.utils.gpu_memory import read_gpus

_GIB = 2**30

# Memory that stays on a GPU when state leaves, on H100s and H200s (docs/measurements/large-models.md, parallelism.md).
# Contexts, code and NCCL's buffers of a single policy worker took 0.8 GiB (DTensor) and 1.3 (Megatron), and of one of
# two up to 1.9 and 2.9. A sleeping engine, with captured graphs, took 1.0 to 1.8, and 4.5 over two GPUs. The driver
# took 0.7 to 0.8.
DRIVER_REST_BYTES = _GIB
DTENSOR_REST_BYTES = {"one": _GIB, "several": 2 * _GIB}
MEGATRON_REST_BYTES = {"one": 3 * _GIB // 2, "several": 3 * _GIB}
ENGINE_REST_BYTES = {"one": 3 * _GIB // 2, "several": 9 * _GIB // 2}


@dataclass(frozen=True)
class GpuRates:
    """Rates of a GPU and of the host that launches its kernels.

    Attributes:
        matrix_flops: FLOP/s of large matrix products in bfloat16, a multiplication and an addition as two.
        memory_bytes_per_s: Bytes of its memory that kernels read or write.
        out_bytes_per_s: Bytes from the GPU to pinned memory of the host.
        in_bytes_per_s: Bytes from pinned memory of the host to the GPU.
        launch_s: Seconds in which the host launches one small operation of torch.
        source: Measurement of these values.
    """

    matrix_flops: float
    memory_bytes_per_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float
    launch_s: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """A type of GPU.

    Attributes:
        name: Name for messages.
        memory_bytes: Memory as the CUDA driver reports it.
        rates: Its rates; None if they are unknown, so that nothing is known of seconds.
    """

    name: str
    memory_bytes: int
    rates: GpuRates | None = None


# The launch cost is that of the hosts of these runs; others were up to half slower.
_LAUNCH_S = 8e-6
KNOWN: Mapping[str, Gpu] = {
    "H100": Gpu(
        "H100",
        int(79.2 * _GIB),
        GpuRates(
            7.5e14,
            2.8e12,
            55e9,
            55e9,
            _LAUNCH_S,
            "the H200's, of the same arithmetic units; memory in the ratio of the data sheets",
        ),
    ),
    "H200": Gpu(
        "H200",
        int(139.8 * _GIB),
        GpuRates(
            7.5e14,
            4.0e12,
            55e9,
            55e9,
            _LAUNCH_S,
            "benchmarks/results/pass_memory.json (products, link), large_model_24b.json (memory: decoding)",
        ),
    ),
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of a name such as `H200` or `NVIDIA H100 80GB HBM3`, or of a file that `--calibrate` wrote.

    Raises:
        ConfigError: The name is unknown (the message lists those that are known), or the file is not such a file.
    """
    if name.endswith(".json"):
        return _read_gpu(Path(name))
    for known, gpu in KNOWN.items():
        if known in name.upper().replace("-", " ").split():
            return gpu
    raise ConfigError(
        f"{name} is no GPU that is known here ({', '.join(KNOWN)}); give its memory with --gpu-gib, or a file that "
        "--calibrate wrote on a machine with one"
    )


def gpu_here() -> Gpu | None:
    """Return the smallest GPU of this machine, with rates if it is of a known type; None without a GPU."""
    use = min(read_gpus().values(), key=lambda use: use.total_bytes, default=None)
    if use is None:
        return None
    try:
        rates = find_gpu(use.name).rates
    except ConfigError:
        rates = None
    return Gpu(use.name, use.total_bytes, rates)


def _read_gpu(path: Path) -> Gpu:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        rates = GpuRates(**read["rates"])
        gpu = Gpu(str(read["name"]), int(read["memory_bytes"]), rates)
        numbers = [getattr(rates, field.name) for field in fields(rates) if field.name != "source"]
        is_right = all(isinstance(number, (int, float)) and number > 0 for number in [gpu.memory_bytes, *numbers])
    except OSError as error:
        raise ConfigError(f"--gpu={path}: {error.strerror or error}; give a file that --calibrate wrote") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--gpu={path} is no file that --calibrate wrote; measure it again") from error
    if not is_right:
        raise ConfigError(f"--gpu={path} has a number that is not above 0; measure it again with --calibrate")
    return gpu
