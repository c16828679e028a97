"""All ranks of one kind of worker as Ray actors, behind `WorkerGroup`.

1. The constructor starts one actor in each slot. The constructor or `build` begins to build all workers at once.
   Neither waits.
2. The first call (or `wait_until_ready`) waits for the workers and raises their errors.
3. A call fails with the first error of any rank, without waiting for ranks that hang because of it.
4. A call in which no rank makes progress any more fails too (see `watch.py`).
5. After an error or a death only `shutdown` may be called, unless the caller knows that the workers are in step.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import ray
import torch
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from nemo_offload_rl.distributed.actors import Outcome, WorkerActor, WorkerLocation
from nemo_offload_rl.distributed.ray_start import descendants_of
from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster
from nemo_offload_rl.distributed.watch import TICK_S, CallTimes, CallWatch
from nemo_offload_rl.errors import UserError, WorkerDiedError, WorkerHungError
from nemo_offload_rl.memory.limits import killed_by_kernel, killed_by_monitor, oom_kills_at_first
from nemo_offload_rl.protocols.loss import Method
from nemo_offload_rl.residency import DeviceOutOfMemoryError

logger = logging.getLogger(__name__)

# When a rank dies, its peers fail in the same collective, often before Ray notices the death.
_LATE_CAUSE_S = 1.5
_CLOSE_TIMEOUT_S = 5.0
_EXIT_TIMEOUT_S = 10.0
_ORPHANS_TIMEOUT_S = 2.0
_LAST_WORDS_LINES = 40
_NAMES_SIGNAL = re.compile(r"\bSIG[A-Z]{3,}\b|Fatal Python error")
# Error of a rank whose peer has left during a collective; gloo has no exception type for it.
_LOST_CONNECTION = re.compile(r"connection (closed|reset|refused)|broken pipe", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Specification of a group.

    Attributes:
        name: Name in messages, such as "policy" or "vllm".
        factory: `"package.module:Class"`, imported in the worker's process.
        kwargs: Arguments of the class, the same for every rank.
        per_rank_kwargs: More arguments, by rank; empty for none.
        env_vars: Variables set in the worker's process before any import; they override the rendezvous variables.
        num_workers: Number of ranks; None for as many as the slots allow.
        slots_per_worker: Number of neighbouring slots of one worker, whose GPUs it sees.
        max_concurrency: Number of calls that one worker runs at a time, each in a thread.
    """

    name: str
    factory: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    per_rank_kwargs: Sequence[Mapping[str, Any]] = ()
    env_vars: Mapping[str, str] = field(default_factory=dict)
    num_workers: int | None = None
    slots_per_worker: int = 1
    max_concurrency: int = 1


@dataclass(frozen=True)
class PendingCall:
    """A call of neighbouring ranks that may still run."""

    method: str
    refs: tuple[Any, ...]
    first_rank: int = 0


class RayWorkerGroup:
    """Implements `WorkerGroup`.

    Every worker finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment. With GPUs it sees
    the devices of its slots only, so LOCAL_RANK is 0 there; on CPU LOCAL_RANK counts the workers of a host.

    Args:
        cluster: Slots of the workers, which end with the cluster.
        spec: See `WorkerSpec`.
        builds: Build the workers at once; otherwise `build` does.
    """

    def __init__(self, cluster: VirtualCluster, spec: WorkerSpec, *, builds: bool = True) -> None:
        self._spec = spec
        span = spec.slots_per_worker
        num_workers = cluster.world_size // span if spec.num_workers is None else spec.num_workers
        if not 1 <= num_workers <= cluster.world_size // span:
            raise ValueError(f"{spec.name}: {num_workers} workers do not fit {cluster.world_size} slots")
        self._cluster = cluster
        self._times = CallTimes.of(cluster.settings)
        cluster.register(self)
        oom_kills_at_first()
        address, port = cluster.rendezvous()
        self._actors: list[Any] = []
        for rank in range(num_workers):
            on_gpu = cluster.settings.device_type == "cuda"
            env_vars = {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_workers),
                "LOCAL_RANK": "0" if on_gpu else str(cluster.local_rank(rank * span)),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                **spec.env_vars,
            }
            options = cluster.actor_options(rank * span, env_vars, num_slots=span, group=spec.name)
            options["max_concurrency"] = spec.max_concurrency
            self._actors.append(WorkerActor.options(**options).remote())
        self._location_refs = [actor.location.remote() for actor in self._actors]
        self._raised: list[BaseException] = []
        self._shown: dict[int, object] = {}  # of dead workers' processes, by the call that showed the last words
        # A call that was interrupted, or failed on some ranks only, may still run on others.
        self._unfinished: set[PendingCall] = set()
        self._building: PendingCall | None = PendingCall("build", ())  # not begun, so there is nothing to close either
        if builds:
            self.build()

    def build(self) -> None:
        """Begin to build the workers, once."""
        refs = tuple(
            actor.build.remote(self._spec.factory, kwargs)
            for actor, kwargs in zip(self._actors, self._kwargs(), strict=True)
        )
        self._building = PendingCall("build", refs)

    def start_before_build(self, function: str, **more: Any) -> Callable[[], list[Any]]:
        """Call `"package.module:function"` in each worker's process with the worker's arguments, before `build`.

        Args:
            function: The function.
            **more: Further arguments.

        Returns:
            A function that waits and returns the results by rank; if it is not called, errors are dropped.
        """
        refs = tuple(
            actor.load.remote(function, {**kwargs, **more})
            for actor, kwargs in zip(self._actors, self._kwargs(), strict=True)
        )
        return partial(self._results, PendingCall("load", refs))

    def _kwargs(self) -> list[dict[str, Any]]:
        """Return the arguments of each rank's worker."""
        extra = self._spec.per_rank_kwargs or ({},) * len(self._actors)
        return [{**self._spec.kwargs, **mine} for mine in extra]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._actors)

    def has_raised(self, error: BaseException) -> bool:
        """Tell whether a call of this group raised this very object, not a call of another group."""
        return any(error is each for each in self._raised)

    def wait_until_ready(self) -> None:
        """Wait until every worker is built.

        Raises:
            WorkerDiedError: A process ended.
            Exception: The error of a worker's constructor.
        """
        if not self._actors:
            raise RuntimeError(f"The {self._spec.name} workers were shut down")
        building, self._building = self._building, None
        if building is not None:
            self._results(building)

    def pids(self) -> list[int]:
        """Return process ids by rank, each on its own host."""
        return [location.pid for location in self._collect(PendingCall("location", tuple(self._location_refs)))]

    def local_pids(self) -> list[int]:
        """Return process ids of the workers on the driver's host."""
        self.wait_until_ready()
        return [location.pid for location in self._local_locations().values()]

    def run_all[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """See `WorkerGroup`."""
        return self.start_all(method, *args, **kwargs)()

    def run_each[*Args, R](self, method: Callable[[Any, *Args], R], per_rank_args: Sequence[tuple[*Args]]) -> list[R]:
        """See `WorkerGroup`."""
        self.wait_until_ready()
        name = method.__name__
        if len(per_rank_args) != self.world_size:
            raise ValueError(f"{name}: {len(per_rank_args)} sets of arguments for {self.world_size} ranks")
        refs = [
            actor.call.remote(name, (tuple(args), {})) for actor, args in zip(self._actors, per_rank_args, strict=True)
        ]
        return self._results(PendingCall(name, tuple(refs)))

    def run_on[**P, R](self, rank: int, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `method` on one rank and return its result; raises the same errors as `run_all`."""
        actors = self._actors  # another thread may shut the workers down
        self.wait_until_ready()
        ref = actors[rank].call.remote(method.__name__, (args, kwargs))
        return self._results(PendingCall(method.__name__, (ref,), rank))[0]

    def start_all[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> Callable[[], list[R]]:
        """See `WorkerGroup`.

        Arguments are sent with the call; Ray puts those above 100 kB into its object store. One `ray.put` for all
        ranks would make a small call take nearly twice as long (benchmarks/call_latency.py).
        """
        self.wait_until_ready()
        refs = tuple(actor.call.remote(method.__name__, (args, kwargs)) for actor in self._actors)
        return partial(self._results, PendingCall(method.__name__, refs))

    def _results(self, call: PendingCall) -> list[Any]:
        """Wait for a call, log the workers' warnings, each once for all ranks, and return the results by rank."""
        outcomes: dict[int, Outcome] = dict(enumerate(self._collect(call), call.first_rank))
        ranks_of: dict[str, list[int]] = {}
        for rank, outcome in outcomes.items():
            for message in outcome.warnings:
                ranks_of.setdefault(message, []).append(rank)
        for message, ranks in ranks_of.items():
            others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
            logger.warning("%s%s: %s", self.label(ranks[0]), others, message)
        return [outcome.value for outcome in outcomes.values()]

    def settle(self, timeout_s: float) -> bool:
        """See `WorkerGroup`; also False if a worker has died."""
        refs = [ref for call in self._unfinished for ref in call.refs]
        _, running = ray.wait(refs, num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        if not running:
            self._unfinished.clear()
        return not running and not any(isinstance(error, WorkerDiedError) for error in self._raised)

    def shutdown(self) -> None:
        """Let idle workers end by themselves, kill them all and wait until their processes are gone."""
        if not self._actors or not ray.is_initialized():
            return
        self._cluster.unregister(self)
        actors, self._actors = self._actors, []
        workers = self._local_processes()
        descendants = [child for worker in workers for child in descendants_of(worker)]
        if self._building is None and not self._unfinished:
            closing = [actor.close.remote() for actor in actors]
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor, no_restart=True)
        _, alive = psutil.wait_procs(workers, timeout=_EXIT_TIMEOUT_S)
        for worker in alive:
            logger.warning("%s (pid %d) did not end when asked to, and is killed", self._spec.name, worker.pid)
        # A resource tracker removes shared memory first; the compilers of torch.compile would stay for long.
        _, orphans = psutil.wait_procs(descendants, timeout=_ORPHANS_TIMEOUT_S)
        for process in [*alive, *orphans]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def label(self, rank: int) -> str:
        """Return name and number of a worker, for messages."""
        return f"{self._spec.name} worker {rank}"

    def _label_with_host(self, rank: int) -> str:
        """Return the label, with the host's address if it is not the driver's host."""
        location = self.locations().get(rank)
        is_remote = location is not None and location.node_id != ray.get_runtime_context().get_node_id()
        return f"{self.label(rank)} on {location.address}" if location and is_remote else self.label(rank)

    def _watch(self, method: str) -> CallWatch:
        return CallWatch(self, self._cluster.groups, method, self._times)

    def _tick(self, watch: CallWatch, ranks: Sequence[int]) -> None:
        """Check daemons and workers, about once a second while ranks have not answered."""
        self._cluster.daemons.check()
        try:
            watch.tick(ranks)
        except WorkerHungError as error:
            self._raised.append(error)
            raise

    def _collect(self, call: PendingCall) -> list[Any]:
        """Return results by rank, or raise the error that explains the failure best, as soon as there is one."""
        self._unfinished.add(call)  # a set, since several threads may each have a call
        results = self._gather(call)
        self._unfinished.discard(call)
        return results

    def _gather(self, call: PendingCall) -> list[Any]:
        rank_of = {ref: rank for rank, ref in enumerate(call.refs, call.first_rank)}
        results: dict[int, Any] = {}
        errors: list[BaseException] = []
        waiting = list(call.refs)
        deadline_s: float | None = None
        watch = self._watch(call.method)
        self._cluster.daemons.check()
        while waiting:
            timeout_s = TICK_S if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout_s)
            if not done and deadline_s is None:
                self._tick(watch, [rank_of[ref] for ref in waiting])
                continue
            if not done:
                break
            rank = rank_of[done[0]]
            try:
                results[rank] = ray.get(done[0])
            except RayError as error:
                errors.append(original_error(error, self._label_with_host(rank), call.method))
                if isinstance(errors[-1], WorkerDiedError) and self._actors:  # not ended by `shutdown`
                    self._show_last_words(rank)
                if isinstance(errors[-1], UserError):
                    break
                deadline_s = deadline_s or time.monotonic() + _LATE_CAUSE_S
        if errors:
            if not waiting:
                self._unfinished.discard(call)
            explanation = self._cluster.daemons.error() or _best_explanation(errors)
            self._raised.append(explanation)
            raise explanation
        watch.answered()
        return [results[rank] for rank in rank_of.values()]

    def _show_last_words(self, rank: int) -> None:
        """Log the end of a dead worker's standard error, which names the reason of a crash in native code.

        Of several threads that waited for the worker, one does.
        """
        location, this_call = self._local_locations().get(rank), object()
        if location is None or self._shown.setdefault(location.pid, this_call) is not this_call:
            return
        try:
            lines = Path(location.stderr_path).read_text(errors="replace").splitlines()
        except OSError:
            return
        # A stack of native code may be longer than the lines shown; its reason comes before it.
        reasons = [line for line in lines[:-_LAST_WORDS_LINES] if _NAMES_SIGNAL.search(line)]
        if lines := reasons[-1:] + lines[-_LAST_WORDS_LINES:]:
            logger.error(
                "the last lines of %s's standard error, from %s:\n%s",
                self.label(rank),
                location.stderr_path,
                "\n".join(lines),
            )

    def locations(self) -> dict[int, WorkerLocation]:
        """Return the workers' locations by rank, without workers that have not started yet."""
        ready, _ = ray.wait(self._location_refs, num_returns=len(self._location_refs), timeout=0)
        found: dict[int, WorkerLocation] = {}
        for rank, ref in enumerate(self._location_refs):
            if ref in ready:
                with suppress(RayError):
                    found[rank] = cast(WorkerLocation, ray.get(ref))
        return found

    def own_stacks(self) -> dict[int, str]:
        """Return Python stacks by rank, from workers that can run this call while they run another."""
        if self._spec.max_concurrency == 1:
            return {}
        refs = [actor.stacks.remote() for actor in self._actors]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=_CLOSE_TIMEOUT_S)
        found: dict[int, str] = {}
        for rank, ref in enumerate(refs):
            if ref in answered:
                with suppress(RayError):
                    found[rank] = cast(str, ray.get(ref))
        return found

    def _local_locations(self) -> dict[int, WorkerLocation]:
        """Return locations on the driver's host; process ids and paths of other hosts have no meaning here."""
        here = ray.get_runtime_context().get_node_id()
        return {rank: location for rank, location in self.locations().items() if location.node_id == here}

    def _local_processes(self) -> list[psutil.Process]:
        """List the workers on the driver's host."""
        found = []
        for location in self._local_locations().values():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(location.pid))
        return found


def _best_explanation(errors: list[BaseException]) -> BaseException:
    """Choose the error that explains most: a death, then another `UserError`, a bug, and last a lost connection."""

    def order(error: BaseException) -> int:
        if isinstance(error, UserError):
            return 0 if isinstance(error, WorkerDiedError) else 1
        return 3 if _LOST_CONNECTION.search(str(error)) else 2

    return min(errors, key=order)


def original_error(error: RayError, worker: str, method: str) -> BaseException:
    """Convert an error of Ray to the exception that the driver raises.

    Args:
        error: Ray's exception for one call.
        worker: Name and rank, for the message.
        method: The call.

    Returns:
        The worker's exception, with the remote traceback as a note, or a `UserError` if it ran out of device memory;
        `WorkerDiedError` with Ray's cause if its process ended; otherwise `error` itself. A death is told as one by the
        kernel, for lack of memory, if that has killed processes of this host.
    """
    if isinstance(error, RayTaskError):
        cause = error.cause
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if not isinstance(cause, BaseException):
            return error
        if isinstance(cause, torch.OutOfMemoryError | DeviceOutOfMemoryError):
            cause = UserError(
                f"{worker} ran out of the device's memory during {method} ({' '.join(str(cause).split())[:300]}); free "
                "memory that other processes hold on it, lower policy.generation.vllm_cfg.gpu_memory_utilization if "
                "an engine shares it, or use more GPUs"
            )
        if isinstance(cause, WorkerDiedError) and (by_kernel := killed_by_kernel()):
            cause = WorkerDiedError(f"{cause} ({by_kernel})")
        cause.add_note(f"Raised in {worker}, {method}:\n{_without_colours(str(error)).strip()}")
        return cause
    if isinstance(error, ActorUnavailableError):
        reason = str(error).partition("RPC error: ")[2].partition(".")[0] or _one_line_cause(str(error))
        return WorkerDiedError(
            f"{worker} died during {method}: its connection broke ({reason}), so its process or its host has ended"
        )
    if isinstance(error, RayActorError | OutOfMemoryError):
        text = str(error)
        cause, by_kernel = killed_by_monitor(text), killed_by_kernel()
        if cause is None:
            cause = _one_line_cause(text) + (f" ({by_kernel})" if by_kernel else "")
        return WorkerDiedError(f"{worker} died during {method}: {cause}")
    return error


def _one_line_cause(text: str) -> str:
    """Shorten Ray's message of several lines to one that ends in the cause, without ids."""
    exit_detail = re.search(r"Worker exit detail: (.*?)(?= If the process was killed by the kernel|$)", text, re.DOTALL)
    if exit_detail:
        pid = re.search(r"^\s*pid: (\d+)", text, re.MULTILINE)
        process = f"process {pid.group(1)}: " if pid else ""
        return process + " ".join(exit_detail.group(1).split())
    lines = [line.strip() for line in _without_colours(text).splitlines()]
    dropped = ("class_name:", "actor_id:", "name:", "namespace:", "The actor died unexpectedly before finishing")
    kept = [line for line in lines if line and not line.startswith(dropped)]
    return " ".join(kept) or text.strip()


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
