"""One process for engines in which vLLM runs as it does in an actor, without Ray: a start takes seconds, not twenty."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked
import torch
import torch._dynamo
from torch import Tensor

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.generation.interfaces import Completion, GenerationEngine, SamplingSettings
from nemo_offload_rl.generation.settings import VllmSettings
from nemo_offload_rl.policy.backends.base import WeightSpec
from nemo_offload_rl.weight_sync.interfaces import WeightBucket
from nemo_offload_rl.weight_sync.shared_memory import SharedMemorySender


def engine_settings(folder: Path, **changes: Any) -> VllmSettings:
    """For a tiny float32 model on the CPU."""
    settings: dict[str, Any] = {
        "model_name": str(folder),
        "hf_config_overrides": {},
        "seed": 0,
        "async_engine": False,
        "precision": "float32",
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_gib": 0.0625,
        "enable_sleep_mode": True,
        "max_model_len": 400,
        "enforce_eager": True,
        "per_request_seeds": True,
        "max_restarts": 0,
        "vllm_kwargs": {},
    }
    return VllmSettings(**(settings | changes))


class EngineProcess:
    """A `GenerationEngine` whose vLLM runs in the process; `start` replaces the model that runs."""

    def __init__(self, pipe: Connection, pid: int) -> None:
        self._pipe = pipe
        self.pid = pid

    def start(self, settings: VllmSettings) -> None:
        """Start an engine, after the end of the one before."""
        self._call("start", settings)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        return self._call("generate", prompts, sampling, num_samples)

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        self._call("prepare_for_generation", tags)

    def finish_generation(self, discard_weights: bool) -> None:
        self._call("finish_generation", discard_weights)

    def load_bucket(self, bucket: WeightBucket) -> None:
        self._call("load_bucket", bucket)

    def finish_refit(self) -> None:
        self._call("finish_refit")

    def shutdown(self) -> None:
        self._call("shutdown")

    def _call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def send_weights(engine: GenerationEngine, tensors: Mapping[str, Tensor], buffer_bytes: int) -> None:
    """A refit with these tensors, in their order and in buckets of that size."""
    specs = [WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    sender = SharedMemorySender(specs, buffer_bytes)
    try:
        sender.start(iter(tensors.items()))
        while (bucket := sender.next_bucket()) is not None:
            engine.load_bucket(bucket)
        engine.finish_refit()
    finally:
        sender.close()


@contextmanager
def engine_process() -> Iterator[EngineProcess]:
    """The process for the `with` block."""
    context = forked.context(with_vllm=True)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        assert process.pid is not None
        yield EngineProcess(ours, process.pid)
    finally:
        ours.close()
        process.join()


def _serve(pipe: Connection) -> None:
    from nemo_offload_rl.generation.vllm.env import vllm_cpu_env

    os.environ.update(vllm_cpu_env())
    torch._dynamo.config.disable = True  # what TORCHDYNAMO_DISABLE does where torch is not imported yet
    torch.set_num_threads(1)
    from nemo_offload_rl.generation.vllm.engine import VllmEngine

    engine: VllmEngine | None = None
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            break
        try:
            if method == "start":
                if engine is not None:
                    engine.shutdown()
                engine, answer = VllmEngine(*args), None
            else:
                answer = getattr(engine, method)(*args)
        except (UserError, RuntimeError) as error:
            answer = error
        pipe.send(answer)
    if engine is not None:
        engine.shutdown()
