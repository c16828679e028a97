"""Translates prompts, sampling and completions for vLLM, and tracks the version of the engine's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import astuple
from itertools import batched
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_offload_rl.errors import DataError
from nemo_offload_rl.generation.vllm.logprob_recorder import SampledTokens
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion, Versions

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.outputs import CompletionOutput

_SEED_LIMIT = 2**63

type Recorded = tuple[list[float], Versions]
"""Logprobs of a response's tokens, and the versions of weights that sampled them."""


class ServedWeights:
    """Version of an engine's weights; used on the engine's event loop.

    Attributes:
        version: Number of refits so far.
        runs: Cleared while the engine is paused for new weights.
    """

    def __init__(self) -> None:
        self.version = 0
        self.runs = asyncio.Event()
        self.runs.set()

    async def next_version(self) -> int:
        """Return the version for a request that begins now; during a pause, wait for the new weights."""
        await self.runs.wait()
        return self.version


def check_prompts(prompts: Sequence[Sequence[int]], max_model_len: int) -> None:
    """Refuse prompts that vLLM cannot continue by at least one token.

    Raises:
        DataError: With the position and length of the first such prompt, the limit and its key.
    """
    for position, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise DataError(f"Prompt {position} of {len(prompts)} is empty; every prompt needs at least one token")
        if len(prompt) >= max_model_len:
            raise DataError(
                f"Prompt {position} of {len(prompts)} has {len(prompt)} tokens, which leaves no room for a response "
                f"in {max_model_len}; raise policy.generation.vllm_cfg.max_model_len or lower data.max_input_seq_length"
            )


def cache_salt(weight_version: int, asked: str | None = None) -> str:
    """Return a salt, so that a request shares cached prefixes only with requests of the same weights.

    Args:
        weight_version: Version of the weights that the request begins with.
        asked: The client's own salt.
    """
    return f"weights {weight_version}" if asked is None else f"weights {weight_version} {asked}"


def sampling_params(
    sampling: SamplingSettings, num_samples: int, position: int, *, records_logprobs: bool
) -> SamplingParams:
    """Return vLLM's sampling parameters for the prompt at `position` of its batch.

    vLLM adds the sample's number to the seed, so each prompt's seed is `num_samples` larger than the previous one's.

    Args:
        sampling: The sampling of its responses.
        num_samples: Number of responses.
        position: See above.
        records_logprobs: The workers record logprobs, so vLLM need not return any.
    """
    from vllm import SamplingParams

    seed = None if sampling.seed is None else (sampling.seed + position * num_samples) % _SEED_LIMIT
    return SamplingParams(
        n=num_samples,
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=0 if sampling.top_k is None else sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings),
        seed=seed,
        logprobs=None if records_logprobs else 0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop_strings),
    )


def sampled_tokens(output: RequestOutput) -> list[SampledTokens]:
    """Name the tokens of each response of a request, for `WorkerExtension.take_logprobs`."""
    names = sample_names(output.request_id, len(output.outputs))
    first = len(output.prompt_token_ids or ())
    return [
        SampledTokens(name, first, len(sample.token_ids)) for name, sample in zip(names, output.outputs, strict=True)
    ]


def sample_names(request: str, num_samples: int) -> list[str]:
    """Return vLLM's names for the responses of a request."""
    return [request] if num_samples == 1 else [f"{number}_{request}" for number in range(num_samples)]


def recorded_tokens(answers: Sequence[list[tuple[bytes, list[int]]] | str | None]) -> Iterator[Recorded]:
    """Return what was recorded of each response from all workers' answers to `take_logprobs`.

    Raises:
        RuntimeError: A token's logprob was not recorded.
    """
    (answer,) = [answer for answer in answers if answer is not None]
    if isinstance(answer, str):
        raise RuntimeError(answer)
    for logprobs, versions in answer:
        pairs = tuple((version, count) for version, count in batched(versions, 2))
        yield np.frombuffer(logprobs, np.float32).tolist(), pairs


def completion_from_output(output: CompletionOutput, recorded: Recorded | None = None) -> Completion:
    """Return the tokens and their sampler's logprobs, including the token that ended the response.

    Args:
        output: One response.
        recorded: What the workers recorded; None if vLLM returned the logprobs, and the versions are unknown.
    """
    logprobs, versions = (_returned_logprobs(output), ()) if recorded is None else recorded
    reason = output.finish_reason or "abort"
    return Completion(list(output.token_ids), logprobs, reason, versions, _routing(output.routed_experts))


def _routing(routed_experts: np.ndarray | None) -> np.ndarray | None:
    """Return vLLM's routing in a type that torch computes with: uint8, or int16 instead of uint16."""
    if routed_experts is None or routed_experts.dtype == np.uint8:
        return routed_experts
    return routed_experts.astype(np.int16)


def _returned_logprobs(output: CompletionOutput) -> list[float]:
    from vllm.logprobs import FlatLogprobs

    flat = output.logprobs
    if flat is None:
        assert not output.token_ids
        return []
    assert isinstance(flat, FlatLogprobs)
    # Each position begins with the sampled token; with `logprobs=0` there is no other.
    assert [flat.token_ids[start] for start in flat.start_indices] == list(output.token_ids)
    return [flat.logprobs[start] for start in flat.start_indices]


class Answers:
    """Completions of an asynchronous engine's requests; used on its event loop.

    Responses that finish while recorded logprobs are read share the next read, so a step has at most one.

    Args:
        take: Calls `WorkerExtension.take_logprobs` in all workers.

    Attributes:
        records_logprobs: The workers record logprobs.
    """

    def __init__(self, take: Callable[[list[list[Any]], list[str]], Awaitable[list[Any]]]) -> None:
        self.records_logprobs = False
        self._take = take
        self._waiting: list[tuple[list[SampledTokens], asyncio.Future[list[Recorded]]]] = []
        self._dropped: list[str] = []
        self._reader: asyncio.Task[None] | None = None

    async def completions(self, output: RequestOutput) -> list[Completion]:
        """Return the completions of a request that has finished.

        Raises:
            RuntimeError: A token's logprob was not recorded.
        """
        if not self.records_logprobs:
            return [completion_from_output(sample) for sample in output.outputs]
        read: asyncio.Future[list[Recorded]] = asyncio.get_running_loop().create_future()
        self._waiting.append((sampled_tokens(output), read))
        self._start_reading()
        recorded = await read
        return [completion_from_output(*sample) for sample in zip(output.outputs, recorded, strict=True)]

    def drop(self, request: str, num_samples: int) -> None:
        """Free the logprobs of a request that was aborted, or whose logprobs nobody asks for."""
        if self.records_logprobs:
            self._dropped += sample_names(request, num_samples)
            self._start_reading()

    def _start_reading(self) -> None:
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while self._waiting or self._dropped:
            waiting, dropped = self._waiting, self._dropped
            self._waiting, self._dropped = [], []
            wanted = [list(astuple(response)) for responses, _ in waiting for response in responses]
            try:
                recorded = recorded_tokens(await self._take(wanted, dropped))
                for responses, read in waiting:
                    of_request = [next(recorded) for _ in responses]
                    if not read.done():  # its caller was cancelled
                        read.set_result(of_request)
            except Exception as error:  # the engine has died
                for _, read in waiting:
                    if not read.done():
                        read.set_exception(error)
