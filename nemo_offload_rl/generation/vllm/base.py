"""What vLLM's synchronous and asynchronous engines have in common: state, checks and refits.

State, all of it explicit: `_awake` holds which of vLLM's two kinds of memory are resident, `_weights_valid` whether the
weights are those of a finished refit (or of a checkpoint). A CPU engine cannot sleep, so there the calls only keep the
state, and misuse (generating while asleep, or after weights were discarded) fails on CPU as it would on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nemo_offload_rl.errors import ConfigError, DeviceMemoryError, WorkerDiedError, first_line
from nemo_offload_rl.generation.vllm.requests import check_prompts
from nemo_offload_rl.generation.vllm.wire import bucket_to_wire
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion
from nemo_offload_rl.protocols.refit import RefitError, RefitGroupAddress, WeightBucket, listed

ALL_TAGS: tuple[str, ...] = ("weights", "kv_cache")
# A policy worker's last copies to the host end within seconds.
HAND_OVER_TIMEOUT_S = 30.0


class VllmEngineBase(ABC):
    """Implements `GenerationEngine` on six primitives of one vLLM engine.

    Args:
        settings: The engine.
        can_sleep: Whether vLLM's sleep mode is on.
        weights_valid: Whether the engine started with real weights.
    """

    def __init__(self, settings: VllmSettings, can_sleep: bool, weights_valid: bool) -> None:
        self._settings = settings
        self._can_sleep = can_sleep
        self._weights_valid = weights_valid
        self._awake = set(ALL_TAGS)
        self._process_names: dict[int, str] = {}

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        """See `GenerationEngine`. With `sampling.seed`, sample j of prompt i draws from seed + i * num_samples + j.

        Without `per_request_seeds` the seed is left aside: all samples draw from the engine's own generator.

        Raises:
            DataError: A prompt is empty or leaves no room for a token.
            RuntimeError: The engine sleeps, or its weights are not those of a finished refit.
        """
        self.check_ready()
        check_prompts(prompts, self._settings.max_model_len)
        return self._generate(prompts, self.effective(sampling), num_samples) if prompts else []

    def effective(self, sampling: SamplingSettings) -> SamplingSettings:
        """The sampling that the engine is asked for."""
        return sampling if self._settings.per_request_seeds else replace(sampling, seed=None)

    def name_processes(self, names: Mapping[int, str]) -> None:
        """Who is who among the processes that share the device, for messages."""
        self._process_names = dict(names)

    def wait_for_room(self, tags: Sequence[str], beside_bytes: int = 0) -> bool:
        """See `GenerationEngine`.

        Raises:
            DeviceMemoryError: Others did not give the device's memory back in time; the message says who holds what.
        """
        asleep = self._asleep(tags)
        if not (asleep and self._can_sleep):
            return True
        names = [[pid, name] for pid, name in self._process_names.items()]
        answers = self._rpc("wait_for_room", (asleep, HAND_OVER_TIMEOUT_S, names, beside_bytes))
        _raise_first([answer for answer in answers if isinstance(answer, str)], DeviceMemoryError)
        return all(answers)

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        """See `GenerationEngine`; waits for room first.

        Raises:
            DeviceMemoryError: As in `wait_for_room`.
        """
        self._wake(ALL_TAGS if tags is None else tuple(tags))

    def _wake(self, wanted: Sequence[str]) -> None:
        """Wake what sleeps of `wanted`."""
        self.wait_for_room(wanted)
        asleep = self._asleep(wanted)
        if asleep and self._can_sleep:
            self._wake_up(asleep)
        self._awake.update(asleep)

    def _asleep(self, wanted: Sequence[str]) -> list[str]:
        """What sleeps of `wanted`."""
        unknown = set(wanted) - set(ALL_TAGS)
        if unknown:
            raise ValueError(f"vLLM has no memory tagged {sorted(unknown)}; the tags are {list(ALL_TAGS)}")
        return [tag for tag in wanted if tag not in self._awake]

    def finish_generation(self, discard_weights: bool) -> None:
        """See `GenerationEngine`. The KV cache is dropped in both cases."""
        if not self._awake:
            return
        # vLLM cannot put half an engine to sleep: it would unmap a second time what sleeps already.
        self._wake(ALL_TAGS)
        if self._can_sleep:
            self._sleep(2 if discard_weights else 1)
        if discard_weights:
            self._weights_valid = False
        self._awake.clear()

    def load_bucket(self, bucket: WeightBucket) -> None:
        """See `GenerationEngine`.

        Raises:
            RefitError: The model has no such tensor, or one of another shape.
        """
        if "weights" not in self._awake:
            raise RuntimeError("load_bucket was called while the weights sleep: call prepare_for_generation first")
        self._weights_valid = False
        _raise_first(self._rpc("refit_load_bucket", (bucket_to_wire(bucket),)), RefitError)

    def finish_refit(self) -> None:
        """See `GenerationEngine`.

        Raises:
            RefitError: Weights never came, or came and were not used; the message names them.
        """
        answers = self._rpc("refit_finish", ())
        _raise_first([answer for answer in answers if isinstance(answer, str)], RefitError)
        _check_all_was_read(answers)
        if not self._reset_prefix_cache():
            raise RefitError("vLLM kept its prefix cache, because requests are running")
        self._weights_valid = True

    def join_refit_group(self, address: RefitGroupAddress, first_rank: int) -> None:
        """Join the communicator of refits between different devices; its other ranks do so at the same time.

        Args:
            address: Where they meet.
            first_rank: Of this engine's workers.
        """
        self._rpc("refit_join_group", (address.host, address.port, address.world_size, first_rank))

    @property
    def is_ready(self) -> bool:
        """Whether the engine is awake with the weights of a finished refit."""
        return self._weights_valid and self._awake.issuperset(ALL_TAGS)

    def check_ready(self) -> None:
        """Raise `RuntimeError` when a response could not come from the policy's weights."""
        if not self._weights_valid:
            raise RuntimeError("generate was called before a refit had brought the weights")
        asleep = [tag for tag in ALL_TAGS if tag not in self._awake]
        if asleep:
            raise RuntimeError(f"generate was called while {' and '.join(asleep)} sleep: call prepare_for_generation")

    @contextmanager
    def deaths_told(self) -> Iterator[None]:
        """For calls of vLLM that need processes of its own: its engine core, or the workers of several GPUs.

        Raises:
            WorkerDiedError: One of them has ended; vLLM says so by errors of other kinds.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            raise WorkerDiedError(f"a process of vLLM's engine core has ended: {first_line(error)}") from error
        except RuntimeError as error:
            if not self._workers_have_failed():
                raise
            raise WorkerDiedError(f"a worker process of vLLM has ended: {first_line(error)}") from error

    def _workers_have_failed(self) -> bool:
        """Whether a worker process of an engine that lives in this process has ended."""
        return False

    @abstractmethod
    def shutdown(self) -> None:
        """See `GenerationEngine`."""

    @abstractmethod
    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int
    ) -> list[list[Completion]]: ...

    @abstractmethod
    def _wake_up(self, tags: list[str]) -> None: ...

    @abstractmethod
    def _sleep(self, level: int) -> None: ...

    @abstractmethod
    def _rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]: ...

    @abstractmethod
    def _reset_prefix_cache(self) -> bool: ...


def start_error(error: ValueError, settings: VllmSettings) -> Exception:
    """A `ConfigError` where the user's numbers are the reason, else the error itself."""
    text = " ".join(str(error).split())
    if "kv cache" in text.lower():
        return ConfigError(
            f"vLLM's KV cache does not fit policy.generation.vllm_cfg.max_model_len={settings.max_model_len}: {text}"
        )
    if settings.vllm_kwargs:
        given = ", ".join(f"{name}={value}" for name, value in settings.vllm_kwargs.items())
        return ConfigError(f"vLLM does not start with policy.generation.vllm_kwargs {given}: {text}")
    return error


def _raise_first(messages: Sequence[str | None], kind: type[Exception]) -> None:
    for message in messages:
        if message is not None:
            raise kind(message)


def _check_all_was_read(partly_read: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Every tensor was read as a whole, by one worker or by all together: vLLM ignores what it does not know.

    Args:
        partly_read: For each worker, by name, the elements that it read and those of the tensor, where it read less.

    Raises:
        RefitError: The engine's model is another one.
    """
    unread: list[str] = []
    for name in set.intersection(*(set(tensors) for tensors in partly_read)):
        num_read = sum(tensors[name][0] for tensors in partly_read)
        if num_read < partly_read[0][name][1]:
            unread.append(name)
    if unread:
        raise RefitError(
            f"The engine used nothing, or only a part, of {listed(unread)}: its model has no weights of that name and "
            "size. vLLM builds this model in another way than the policy; choose one that both build alike."
        )
