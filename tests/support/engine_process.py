"""Engines in which vLLM runs as it does in an actor, without Ray: a start takes a second, not twenty.

Processes of vLLM's own, an engine core or workers, are forked from it, where vLLM would spawn them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
import torch
import torch._dynamo
from torch import Tensor

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.keys.data import TokenizerConfig
from nemo_offload_rl.keys.engine import EndpointSettings, Listening, VllmSettings
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.backend import WeightSpec
from nemo_offload_rl.protocols.engine import Completion, GenerationEngine
from nemo_offload_rl.protocols.refit import WeightBucket
from nemo_offload_rl.weight_sync.shared_memory import SharedMemorySender

TOKEN = "a-token-of-these-tests"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GRAPHS = {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}


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


def with_graphs(**vllm_kwargs: Any) -> dict[str, Any]:
    """Changes of `engine_settings` for captured graphs on a GPU; a CPU has none.

    Few sizes are captured, and without torch.compile: such an engine starts in about the time of an eager one.
    """
    if not torch.cuda.is_available():
        return {"vllm_kwargs": vllm_kwargs}
    return {"enforce_eager": False, "vllm_kwargs": {"compilation_config": GRAPHS, **vllm_kwargs}}


def endpoint_settings(folder: Path, **changes: Any) -> EndpointSettings:
    """On any free port of this machine, for who bears `TOKEN`, with turns that `TEMPLATE` tells apart."""
    settings: dict[str, Any] = {
        "listening": Listening("127.0.0.1", 0, TOKEN),
        "tokenizer": TokenizerConfig(name=str(folder), chat_template=TEMPLATE, chat_template_kwargs=None),
        "add_bos": True,
        "serving_chat_kwargs": {},
    }
    return EndpointSettings(**(settings | changes))


class EngineProcess:
    """A `GenerationEngine` whose vLLM runs in a process of its own; `start` replaces process and engine."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    def start(self, settings: VllmSettings) -> None:
        """Start an engine in a new process; the one before is killed."""
        if self._process is not None:
            self._process.kill()
            self.end()
        context = forked.context(with_vllm=True)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings))
        self._process.start()
        theirs.close()
        self._answer()

    def end(self) -> None:
        """Shut the engine down and wait for the end of its process."""
        if self._process is not None:
            self._pipe.close()
            self._process.join()
            self._process = None

    def call(self, method: str, *args: Any) -> Any:
        """What another method of the engine returns."""
        return self._call(method, *args)

    def begin(self, method: str, *args: Any) -> None:
        """Have a method of the engine called in a thread; `ended` waits for it."""
        self._call("begin", method, *args)

    def ended(self) -> Any:
        """What the oldest call returned that was begun."""
        return self._call("ended")

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        return self._call("generate", prompts, sampling, num_samples)

    def wait_for_room(self, tags: Sequence[str], extra_bytes: int = 0) -> bool:
        return self._call("wait_for_room", tags, extra_bytes)

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        self._call("prepare_for_generation", tags)

    def finish_generation(self, discard_weights: bool) -> None:
        self._call("finish_generation", discard_weights)

    def load_bucket(self, bucket: WeightBucket) -> None:
        self._call("load_bucket", bucket)

    def finish_refit(self, version: int = 0) -> None:
        self._call("finish_refit", version)

    def shutdown(self) -> None:
        self._call("shutdown")

    def _call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        return self._answer()

    def _answer(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def send_weights(engine: GenerationEngine, tensors: Mapping[str, Tensor], buffer_bytes: int, version: int = 0) -> None:
    """A refit with these tensors, in their order and in buckets of that size."""
    specs = [WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    sender = SharedMemorySender(specs, buffer_bytes)
    try:
        sender.start(iter(tensors.items()))
        while (bucket := sender.next_bucket()) is not None:
            engine.load_bucket(bucket)
        engine.finish_refit(version)
    finally:
        sender.close()


@contextmanager
def engine_process() -> Iterator[EngineProcess]:
    """The process for the `with` block, from the first `start` on."""
    engine = EngineProcess()
    try:
        yield engine
    finally:
        engine.end()


def engine_here(settings: VllmSettings) -> Any:
    """An engine in this process, whose variables are vLLM's; on CPUs, vLLM forks its own processes from it."""
    from nemo_offload_rl.generation.vllm.async_engine import AsyncVllmEngine
    from nemo_offload_rl.generation.vllm.engine import VllmEngine

    if forked.has_vllm_for_cpus():
        forked.fork_processes_of_vllm()
    return (AsyncVllmEngine if settings.async_engine else VllmEngine)(settings)


def _serve(pipe: Connection, settings: VllmSettings) -> None:
    from nemo_offload_rl.generation.vllm.engine_args import vllm_env

    on_cpu = forked.has_vllm_for_cpus()
    os.environ.update(vllm_env("cpu" if on_cpu else "cuda"))
    torch._dynamo.config.disable = on_cpu  # what TORCHDYNAMO_DISABLE does where torch is not imported yet
    torch.set_num_threads(1)
    try:
        engine = engine_here(settings)
    except (UserError, RuntimeError) as error:
        pipe.send(error)
        return
    pipe.send(None)
    threads, begun = ThreadPoolExecutor(), deque[Future[Any]]()
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            break
        try:
            if method == "begin":
                answer = begun.append(threads.submit(getattr(engine, args[0]), *args[1:]))
            elif method == "ended":
                answer = begun.popleft().result()
            else:
                answer = getattr(engine, method)(*args)
        except (UserError, RuntimeError) as error:
            answer = error
        pipe.send(answer)
    engine.shutdown()
