"""Base class of vLLM's synchronous and asynchronous engines: state, checks and refits.

`_awake` holds the tags of vLLM's memory that is resident. `_weights_valid` is True if the weights come from a finished
refit or a checkpoint. A CPU engine cannot sleep: its calls change only this state, so misuse (generating while asleep,
or after weights were discarded) fails as it does on a GPU.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nemo_offload_rl.errors import ConfigError, DeviceMemoryError, WorkerDiedError, first_line
from nemo_offload_rl.generation.vllm.adapter_loading import adapter_request
from nemo_offload_rl.generation.vllm.requests import check_prompts
from nemo_offload_rl.generation.vllm.wire import bucket_to_wire
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion, Finished
from nemo_offload_rl.protocols.refit import RefitError, RefitGroupAddress, WeightBucket, listed
from nemo_offload_rl.utils.traces import named_range

_LOG = logging.getLogger(__name__)
ALL_TAGS: tuple[str, ...] = ("weights", "kv_cache")
HAND_OVER_TIMEOUT_S = 30.0  # a policy worker's last copies to the host take seconds


class VllmEngineBase(ABC):
    """Implements `GenerationEngine` on a few primitives of one vLLM engine.

    Args:
        settings: The engine's settings.
        can_sleep: vLLM's sleep mode is on.
        weights_valid: The engine starts with real weights.
    """

    def __init__(self, settings: VllmSettings, can_sleep: bool, weights_valid: bool) -> None:
        if settings.is_quantized:
            import nemo_offload_rl.generation.vllm.fp8_config  # noqa: F401  vLLM knows the method from now on
        self._settings = settings
        self._can_sleep = can_sleep
        # Of the model alone, until a refit brings the adapters.
        self._weights_valid = weights_valid and settings.adapters is None
        self._adapters = None if settings.adapters is None else adapter_request()
        self._awake = set(ALL_TAGS)
        self._process_names: dict[int, str] = {}
        self._records_logprobs = False

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        """See `GenerationEngine`. With `sampling.seed`, sample j of prompt i uses seed + i * num_samples + j.

        Without `per_request_seeds` the seed is ignored, and all samples use the engine's own generator.

        Raises:
            DataError: A prompt is empty or leaves no room for a token.
            RuntimeError: The engine sleeps, or its weights are not valid.
        """
        self.check_ready()
        check_prompts(prompts, self._settings.max_model_len)
        with named_range("generation"):
            return self._generate(prompts, self.effective(sampling), num_samples) if prompts else []

    def begin_generation(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sequence[SamplingSettings]]
    ) -> None:
        """Begin to sample responses, which `take_finished` returns; all earlier ones must have been taken.

        Args:
            prompts: Token ids.
            samplings: For each prompt, the sampling of each of its responses, with its own seed.

        Raises:
            DataError: A prompt is empty or leaves no room for a token.
            RuntimeError: The engine sleeps, or its weights are not valid.
        """
        self.check_ready()
        check_prompts(prompts, self._settings.max_model_len)
        for place, (prompt, of_prompt) in enumerate(zip(prompts, samplings, strict=True)):
            for number, sampling in enumerate(of_prompt):
                self._begin(prompt, self.effective(sampling), (place, number))

    def take_finished(self, wait_s: float) -> list[Finished]:
        """Return the responses that have finished since the last call, after `wait_s` or when all have finished.

        `VllmEngine` generates only during this call, at least one token of each running response.
        """
        with self.deaths_told(), named_range("generation"):
            return self._take_finished(wait_s)

    def effective(self, sampling: SamplingSettings) -> SamplingSettings:
        """Drop the seed from the sampling, unless requests have their own seeds."""
        return sampling if self._settings.per_request_seeds else replace(sampling, seed=None)

    def record_logprobs(self, on: bool) -> None:
        """Record logprobs of sampled tokens in the workers, or have vLLM return them with each token, which is slower.

        An engine records if it can. The values are the same. No response may be under way.
        """
        reasons = [reason for reason in self._rpc("record_logprobs", (on,)) if reason is not None]
        self._records_logprobs = on and not reasons
        if reasons:
            _LOG.info("vLLM returns logprobs with each token, which is slower than recording them: %s", reasons[0])

    def name_processes(self, names: Mapping[int, str]) -> None:
        """Name the processes that share the device, by process id, for messages."""
        self._process_names = dict(names)

    def wait_for_room(self, tags: Sequence[str], extra_bytes: int = 0) -> bool:
        """See `GenerationEngine`.

        Raises:
            DeviceMemoryError: Other processes did not release memory in time; the message says which hold how much.
        """
        asleep = self._asleep(tags)
        if not (asleep and self._can_sleep):
            return True
        names = [[pid, name] for pid, name in self._process_names.items()]
        answers = self._rpc("wait_for_room", (asleep, HAND_OVER_TIMEOUT_S, names, extra_bytes))
        _raise_first([answer for answer in answers if isinstance(answer, str)], DeviceMemoryError)
        return all(answers)

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        """See `GenerationEngine`; waits for room first.

        Raises:
            DeviceMemoryError: As in `wait_for_room`.
        """
        self._wake(ALL_TAGS if tags is None else tuple(tags))

    def _wake(self, wanted: Sequence[str]) -> None:
        """Wake the memory of these tags that is asleep."""
        self.wait_for_room(wanted)
        asleep = self._asleep(wanted)
        if asleep and self._can_sleep:
            self._wake_up(asleep)
        self._awake.update(asleep)

    def _asleep(self, wanted: Sequence[str]) -> list[str]:
        """List these tags whose memory is asleep."""
        unknown = set(wanted) - set(ALL_TAGS)
        if unknown:
            raise ValueError(f"vLLM has no memory tagged {sorted(unknown)}; the tags are {list(ALL_TAGS)}")
        return [tag for tag in wanted if tag not in self._awake]

    def finish_generation(self, discard_weights: bool) -> None:
        """See `GenerationEngine`. Always drops the KV cache."""
        if not self._awake:
            return
        # vLLM cannot put half an engine to sleep: it would unmap the sleeping half a second time.
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

    def finish_refit(self, version: int = 0) -> None:
        """See `GenerationEngine`.

        Raises:
            RefitError: Weights did not come or were not used; the message names them.
        """
        answers = self._rpc("refit_finish", (version,))
        _raise_first([answer for answer in answers if isinstance(answer, str)], RefitError)
        _check_all_was_read(answers)
        if not self._reset_prefix_cache():
            raise RefitError("vLLM kept its prefix cache, because requests are running")
        self._weights_valid = True

    def join_refit_group(self, address: RefitGroupAddress, first_rank: int) -> None:
        """Join the communicator for refits between different devices, at the same time as its other ranks.

        Args:
            address: Address at which the ranks meet.
            first_rank: Rank of this engine's first worker.
        """
        self._rpc("refit_join_group", (address.host, address.port, address.world_size, first_rank))

    def start_trace(self) -> None:
        self._rpc("start_step_trace", ())

    def stop_trace(self, prefix: str) -> list[str]:
        """See `Traced`; the names end with the worker's rank in the engine."""
        return [problem for problem in self._rpc("stop_step_trace", (prefix,)) if problem is not None]

    @property
    def is_ready(self) -> bool:
        """Return whether the engine is awake with valid weights."""
        return self._weights_valid and self._awake.issuperset(ALL_TAGS)

    def check_ready(self) -> None:
        """Raise `RuntimeError` unless responses would come from the policy's weights."""
        if not self._weights_valid:
            raise RuntimeError("generate was called before a refit had brought the weights")
        asleep = [tag for tag in ALL_TAGS if tag not in self._awake]
        if asleep:
            raise RuntimeError(f"generate was called while {' and '.join(asleep)} sleep: call prepare_for_generation")

    @contextmanager
    def deaths_told(self) -> Iterator[None]:
        """Turn vLLM's errors about the end of its processes (engine core, workers of several GPUs) into ours.

        Raises:
            WorkerDiedError: One of the processes has ended.
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
        """Tell whether a worker process has ended, if the engine core is in this process."""
        return False

    @abstractmethod
    def shutdown(self) -> None:
        """See `GenerationEngine`."""

    @abstractmethod
    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int
    ) -> list[list[Completion]]: ...

    @abstractmethod
    def _begin(self, prompt: Sequence[int], sampling: SamplingSettings, place: tuple[int, int]) -> None: ...

    @abstractmethod
    def _take_finished(self, wait_s: float) -> list[Finished]: ...

    @abstractmethod
    def _wake_up(self, tags: list[str]) -> None: ...

    @abstractmethod
    def _sleep(self, level: int) -> None: ...

    @abstractmethod
    def _rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]: ...

    @abstractmethod
    def _reset_prefix_cache(self) -> bool: ...


def import_engine(settings: VllmSettings) -> None:
    """Import what an engine needs in this process, which takes many seconds and no device memory."""
    if settings.async_engine:  # its core has a process of its own
        import vllm.v1.engine.async_llm

        return
    import vllm.entrypoints.llm
    import vllm.v1.worker.gpu_worker  # noqa: F401


def start_error(error: ValueError, settings: VllmSettings) -> Exception:
    """Turn an error that the user's settings caused into a `ConfigError`; return any other unchanged."""
    text = " ".join(str(error).split())
    if "kv cache" in text.lower():
        return ConfigError(
            f"vLLM's KV cache does not fit policy.generation.vllm_cfg.max_model_len={settings.max_model_len}: {text}"
        )
    if settings.is_quantized and ("capability" in text or "not divisible by weight quantization" in text):
        return ConfigError(
            f"vLLM cannot build this model with policy.generation.vllm_cfg.precision=fp8 ({text}); set it to bfloat16, "
            "or name layers that keep it in quantization_ignored_layer_kws"
        )
    if settings.vllm_kwargs:  # an evaluation sets load_format itself
        given = ", ".join(f"{name}={value}" for name, value in settings.vllm_kwargs.items() if name != "load_format")
        given = f" with policy.generation.vllm_kwargs {given}" if given else ""
        return ConfigError(f"vLLM does not start{given}: {text}")
    return error


def _raise_first(messages: Sequence[str | None], kind: type[Exception]) -> None:
    for message in messages:
        if message is not None:
            raise kind(message)


def _check_all_was_read(partly_read: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Check that all workers together read every tensor whole, since vLLM ignores tensors that it does not know.

    Args:
        partly_read: For each worker, by name of the tensors that it read in part: elements read, and all elements.

    Raises:
        RefitError: A tensor was not read whole, so the engine's model differs.
    """
    unread: list[str] = []
    for name in set.intersection(*(set(tensors) for tensors in partly_read)):
        num_read = sum(tensors[name][0] for tensors in partly_read)
        if num_read < partly_read[0][name][1]:
            unread.append(name)
    if unread:
        raise RefitError(
            f"The engine used nothing, or only a part, of {listed(unread)}: its model has no weights of that name and "
            "size, because vLLM builds this model in another way; choose a model that vLLM and "
            "the policy build in the same way."
        )
