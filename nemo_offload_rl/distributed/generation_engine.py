"""The driver's side of one or several vLLM engines, each a Ray actor."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nemo_offload_rl.distributed.prepared import IMPORT_ENGINE
from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster
from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.generation.served_rollouts import ServedCall
from nemo_offload_rl.generation.vllm.async_engine import AsyncVllmEngine
from nemo_offload_rl.generation.vllm.engine import VllmEngine
from nemo_offload_rl.generation.vllm.engine_args import engine_env
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.generation import SamplingSettings, engine_devices_problem
from nemo_offload_rl.protocols.engine import Completion, Finished
from nemo_offload_rl.protocols.refit import RefitGroupAddress, WeightBucket

_MAX_REQUESTS_IN_FLIGHT = 256
_KEPT_FREE = 64  # requests in flight that are left to calls other than generation
_WAIT_S = 2.0
_CALLS_AHEAD = 2


class RayGenerationEngine:
    """Implements `GenerationEngine` for all engines together: prompts are split among them, other calls go to each.

    The constructor does not wait for the engines to start; `wait_until_ready` or the first call does.

    Args:
        cluster: Slots of the engines, which end with the cluster.
        settings: Settings of the engines; engine i has `seed` + i.
        begins: Start the engines at once; otherwise `begin` does, and meanwhile they import vLLM.

    Raises:
        ConfigError: `tensor_parallel_size` does not fit the cluster.
    """

    def __init__(self, cluster: VirtualCluster, settings: VllmSettings, *, begins: bool = True) -> None:
        device_type, tp_size = cluster.settings.device_type, settings.tensor_parallel_size
        num_engines = cluster.world_size // tp_size
        if problem := engine_devices_problem(tp_size, cluster.settings.workers_per_node):
            raise ConfigError(problem)
        kind = AsyncVllmEngine if settings.async_engine else VllmEngine
        spec = WorkerSpec(
            name="vllm",
            factory=f"{kind.__module__}:{kind.__name__}",
            per_rank_kwargs=[{"settings": _of_engine(settings, i)} for i in range(num_engines)],
            env_vars={**engine_env(settings, device_type), "RANK": "0", "WORLD_SIZE": "1"},
            num_workers=num_engines,
            slots_per_worker=tp_size,
            max_concurrency=_MAX_REQUESTS_IN_FLIGHT if settings.async_engine else 1,
        )
        self._cluster = cluster
        self._spec = spec
        self._group = RayWorkerGroup(cluster, spec, builds=begins)
        # Waited for before `build`: an asynchronous engine runs calls in threads, and no two may import vLLM together.
        self._import = None if begins else self._group.start_before_build(IMPORT_ENGINE)
        self._tp_size = tp_size
        self._loads = EngineLoads(num_engines)

    @property
    def group(self) -> RayWorkerGroup:
        """The engines' processes; replaced by a restart."""
        return self._group

    def begin(self) -> None:
        """Start engines that have not begun (see `begins`), without waiting for them to be ready."""
        if self._import is not None:
            self._import()
        self._group.build()

    def restart(self) -> None:
        """End the engines and start new ones in the same slots, without any state of the old ones."""
        self._group.shutdown()
        self._group = RayWorkerGroup(self._cluster, self._spec)

    def wait_until_ready(self) -> None:
        """Wait until every engine has started, or raise its error."""
        self._group.wait_until_ready()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        """See `GenerationEngine`; with a seed, the draws do not depend on the number of engines."""
        bounds = _shares(len(prompts), self._group.world_size)
        shares = []
        for start, end in bounds:
            seed = None if sampling.seed is None else sampling.seed + start * num_samples
            shares.append((list(prompts[start:end]), replace(sampling, seed=seed), num_samples))
        return [completions for share in self._group.run_each(VllmEngine.generate, shares) for completions in share]

    @property
    def most_callers(self) -> int:
        """See `EngineGroup`."""
        return (_MAX_REQUESTS_IN_FLIGHT - _KEPT_FREE) * self._group.world_size

    def num_in_progress(self) -> int:
        """See `EngineGroup`."""
        return sum(self._group.run_all(AsyncVllmEngine.num_in_progress))

    @contextmanager
    def reserve(self) -> Iterator[OneRayEngine]:
        """See `EngineGroup`."""
        with self._loads.least() as number:
            yield OneRayEngine(self, number)

    def generate_as_finished(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sequence[SamplingSettings]]
    ) -> Iterator[list[Finished]]:
        """Generate responses and yield them as they finish, those of about two seconds at a time.

        The engines go on while the caller works on what they have yielded.

        Args:
            prompts: Token ids.
            samplings: For each prompt, the sampling of each of its responses, with its own seed.
        """
        bounds = _shares(len(prompts), self._group.world_size)
        shares = [(list(prompts[start:end]), list(samplings[start:end])) for start, end in bounds]
        self._group.run_each(VllmEngine.begin_generation, shares)
        num_left = sum(map(len, samplings))
        # Each engine has its next call already when it returns from one, so it waits neither for Ray nor for others.
        calls = deque(self._group.start_all(VllmEngine.take_finished, _WAIT_S) for _ in range(_CALLS_AHEAD))
        away_s = 0.0
        while calls:
            answers = calls.popleft()()
            found = [
                (start + place, number, completion)
                for (start, _), answer in zip(bounds, answers, strict=True)
                for place, number, completion in answer
            ]
            num_left -= len(found)
            if num_left:
                calls.append(self._group.start_all(VllmEngine.take_finished, max(_WAIT_S, away_s)))
            began_s = time.monotonic()
            yield found
            away_s = time.monotonic() - began_s

    def open_rollouts(self, sampling: Sequence[SamplingSettings]) -> list[str]:
        """Open a rollout for each sampling, on the engines in turn; return each base URL for a client of OpenAI's."""
        names = [uuid.uuid4().hex for _ in sampling]
        size = self._group.world_size
        urls = self._group.run_all(AsyncVllmEngine.endpoint_url)
        shares = [dict(list(zip(names, sampling, strict=True))[engine::size]) for engine in range(size)]
        self._group.run_each(AsyncVllmEngine.open_rollouts, [(share,) for share in shares])
        return [f"{urls[index % size]}/rollouts/{name}/v1" for index, name in enumerate(names)]

    def take_rollouts(self, base_urls: Sequence[str]) -> list[list[ServedCall]]:
        """Close rollouts by the URLs that `open_rollouts` returned, and return the calls of each."""
        names = [url.split("/")[-2] for url in base_urls]
        size = self._group.world_size
        answers = self._group.run_each(
            AsyncVllmEngine.take_rollouts, [(names[engine::size],) for engine in range(size)]
        )
        calls = {name: share for answer in answers for name, share in answer.items()}
        return [calls[name] for name in names]

    @property
    def num_devices(self) -> int:
        """Number of devices of all engines."""
        return self._group.world_size * self._tp_size

    def join_refit_group(self, address: RefitGroupAddress) -> None:
        """Have every device join the refit communicator, from rank 1 on; rank 0 is the policy's."""
        ranks = [1 + engine * self._tp_size for engine in range(self._group.world_size)]
        self._group.run_each(VllmEngine.join_refit_group, [(address, rank) for rank in ranks])

    def name_processes(self, names: Mapping[int, str]) -> None:
        """Tell the engines the names of processes that share the devices, for messages."""
        self._group.run_all(VllmEngine.name_processes, dict(names))

    def wait_for_room(self, tags: Sequence[str], extra_bytes: int = 0) -> bool:
        """See `GenerationEngine`; return whether every device has room."""
        return all(self._group.run_all(VllmEngine.wait_for_room, list(tags), extra_bytes))

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        """See `GenerationEngine`."""
        self._group.run_all(VllmEngine.prepare_for_generation, None if tags is None else list(tags))

    def finish_generation(self, discard_weights: bool) -> None:
        """See `GenerationEngine`."""
        self._group.run_all(VllmEngine.finish_generation, discard_weights)

    def load_bucket(self, bucket: WeightBucket) -> None:
        """See `GenerationEngine`; return when every engine has copied the bucket."""
        self._group.run_all(VllmEngine.load_bucket, bucket)

    def finish_refit(self, version: int = 0) -> None:
        """See `GenerationEngine`."""
        self._group.run_all(VllmEngine.finish_refit, version)

    def pause_generation(self, recompute_kv_cache: bool) -> None:
        """See `PausingEngine`; needs `async_engine`."""
        self._group.run_all(AsyncVllmEngine.pause_generation, recompute_kv_cache)

    def abort_generation(self) -> None:
        """See `PausingEngine`; needs `async_engine`."""
        self._group.run_all(AsyncVllmEngine.abort_generation)

    def resume_generation(self) -> None:
        """See `PausingEngine`; needs `async_engine`."""
        self._group.run_all(AsyncVllmEngine.resume_generation)

    def start_trace(self) -> None:
        """See `Traced`."""
        self._group.run_all(VllmEngine.start_trace)

    def stop_trace(self, prefix: str) -> list[str]:
        """See `Traced`; the names end with the engine's number and the worker's rank in it."""
        names = [(f"{prefix}_engine_{number}",) for number in range(self._group.world_size)]
        return [problem for problems in self._group.run_each(VllmEngine.stop_trace, names) for problem in problems]

    def shutdown(self) -> None:
        """See `GenerationEngine`."""
        self._group.shutdown()


@dataclass(frozen=True)
class OneRayEngine:
    """Implements `OneEngine` for an engine of a group, which may be restarted meanwhile."""

    engines: RayGenerationEngine
    number: int

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        """See `GenerationEngine`."""
        return self.engines.group.run_on(self.number, VllmEngine.generate, prompts, sampling, num_samples)

    def generate_each(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingSettings]
    ) -> list[Completion]:
        """See `OneEngine`."""
        return self.engines.group.run_on(self.number, AsyncVllmEngine.generate_each, prompts, samplings)


class EngineLoads:
    """Counts the callers of each engine; several threads may use it."""

    def __init__(self, num_engines: int) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * num_engines

    @contextmanager
    def least(self) -> Iterator[int]:
        """Count the caller at the engine that has the fewest, until the context ends; yields the engine's number."""
        with self._lock:
            number = self._counts.index(min(self._counts))
            self._counts[number] += 1
        try:
            yield number
        finally:
            with self._lock:
                self._counts[number] -= 1


def _of_engine(settings: VllmSettings, number: int) -> VllmSettings:
    """Return the settings of one engine, with its own seed and port."""
    endpoint = settings.endpoint
    if endpoint is not None:
        endpoint = replace(endpoint, listening=endpoint.listening.further(number))
    return replace(settings, seed=settings.seed + number, endpoint=endpoint)


def _shares(count: int, parts: int) -> list[tuple[int, int]]:
    """Split `count` items into contiguous ranges whose sizes differ by at most one."""
    base, extra = divmod(count, parts)
    bounds, start = [], 0
    for part in range(parts):
        end = start + base + (part < extra)
        bounds.append((start, end))
        start = end
    return bounds
