"""Records the logprobs of sampled tokens in the worker.

vLLM returns logprobs with the tokens of each decode step: it copies them to the host and splits them by response, which
takes a quarter of a rollout's seconds. Here they stay on the device until responses end. They are bit for bit the
numbers that vLLM returns with `logprobs_mode="processed_logprobs"`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_KNOWN_VERSIONS = ("0.25.1",)  # of vLLM; a release may change the methods that are wrapped here
_CHUNK_TOKENS = 2**18
_UNKNOWN, _KEPT = -1, -2


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens of one response.

    Attributes:
        request: Name of the request, without the random characters that vLLM adds.
        first: Position of the first of them, which is the length of the prompt.
        count: Their number.
    """

    request: str
    first: int
    count: int


@dataclass(frozen=True)
class _Step:
    """One step's logprobs [N], requests, positions and versions [3, N], and an event after which logprobs are valid."""

    logprobs: Tensor
    rows: NDArray[np.int32]
    done: torch.cuda.Event | None


class LogprobRecorder:
    """Logprobs of sampled tokens, by request and position, and the version of weights that sampled each.

    A token takes 4 bytes of the device until the next `take`, then 16 bytes of the host until its response is taken or
    dropped.

    Args:
        device: Device that samples.
        chunk_tokens: Tokens for which memory of the device is allocated at once.
        version: Version of the weights.

    Attributes:
        version: Version of the weights that sample from now on.
    """

    def __init__(self, device: torch.device, chunk_tokens: int = _CHUNK_TOKENS, version: int = 0) -> None:
        self.version = version
        self._device = device
        self._chunk_tokens = chunk_tokens
        self._room = torch.empty(0, device=device)  # the rest of the last chunk
        self._steps: deque[_Step] = deque()
        self._ids: dict[str, str] = {}  # vLLM's name of each request whose tokens are kept
        self._numbers: dict[str, int] = {}  # by vLLM's name
        self._next_number = 0
        self._gone: list[str] = []  # taken or dropped, and numbered `_UNKNOWN`: vLLM may sample once more for them
        self._batch: tuple[list[str] | None, NDArray[np.int32]] = (
            None,
            np.empty(0, np.int32),
        )  # requests of the last step
        self._logprobs = np.empty(0, np.float32)  # [T], on the host, as they were sampled
        self._rows = np.empty((3, 0), np.int32)  # [3, T], as in `_Step`
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def add(
        self, logprobs: Tensor, requests: Sequence[str], positions: NDArray[Any], is_sampled: NDArray[np.bool_]
    ) -> None:
        """Record one step, without waiting for the device.

        Args:
            logprobs: [N] float32, of the token sampled for each request.
            requests: Names of the requests, with random characters after the last hyphen.
            positions: [N], of these tokens in their sequences.
            is_sampled: [N], False for a token that vLLM ignores, since only a part of the prompt has been read.
        """
        if requests != self._batch[0]:
            self._batch = (list(requests), self._numbers_of(requests))
        version = np.full(len(positions), self.version, np.int32)
        rows = np.stack([self._batch[1], positions.astype(np.int32), version])
        if not is_sampled.all():
            rows[0, ~is_sampled] = _UNKNOWN
        if len(self._room) < len(logprobs):
            self._room = torch.empty(max(self._chunk_tokens, len(logprobs)), device=self._device)
        kept, self._room = self._room[: len(logprobs)], self._room[len(logprobs) :]
        kept.copy_(logprobs)
        done = None
        if self._copies is not None:
            done = torch.cuda.Event()
            done.record()
        self._steps.append(_Step(kept, rows, done))

    def take(
        self, responses: Sequence[SampledTokens], dropped: Sequence[str] = ()
    ) -> list[tuple[NDArray[np.float32], list[int]]]:
        """Return logprobs and versions of complete responses; forget those, and all of the dropped requests.

        A position that was sampled twice, since vLLM discarded the first token, has the last logprob. A step that the
        device still computes is not waited for: complete responses are of earlier steps.

        Returns:
            For each response its logprobs [count], and in turn a version of weights and the number of tokens that it
            sampled.

        Raises:
            LookupError: A token was not recorded.
        """
        self._copy_to_host()
        numbers = [self._forget(response.request) for response in responses]
        for request in dropped:
            self._forget(request)
        self._batch = (None, self._batch[1])
        owners = self._owners(numbers)
        counts = np.array([response.count for response in responses], np.int64)
        taken = np.flatnonzero(owners >= 0)
        owner = owners[taken]
        index = self._rows[1, taken] - np.array([response.first for response in responses], np.int64)[owner]
        inside = (index >= 0) & (index < counts[owner])  # vLLM may sample on after a token that ends the response
        ends = counts.cumsum()
        places = ((ends - counts)[owner] + index)[inside]
        found = np.zeros(counts.sum(), np.bool_)
        found[places] = True
        logprobs = np.empty(len(found), np.float32)
        logprobs[places] = self._logprobs[taken[inside]]  # where a place comes twice, the last value stays
        versions = np.empty(len(found), np.int32)
        versions[places] = self._rows[2, taken[inside]]
        self._logprobs, self._rows = self._logprobs[owners == _KEPT], self._rows[:, owners == _KEPT]
        if not found.all():
            place = int(found.argmin())
            response = responses[int(np.searchsorted(ends, place, side="right"))]
            raise LookupError(
                f"token {place - int(ends[place >= ends].max(initial=0))} of {response.count} of request "
                f"{response.request} was not recorded when it was sampled"
            )
        if not responses:
            return []
        of_each = zip(np.split(logprobs, ends[:-1]), np.split(versions, ends[:-1]), strict=True)
        return [(each, _run_lengths(sampled_by)) for each, sampled_by in of_each]

    def _numbers_of(self, requests: Sequence[str]) -> NDArray[np.int32]:
        """Return a number for each request; no number is used twice."""
        if self._gone:
            running = set(requests)
            for request in self._gone:
                if request not in running:
                    del self._numbers[request]
            self._gone = [request for request in self._gone if request in running]
        for request in requests:
            if request not in self._numbers:
                self._ids[request.rpartition("-")[0]] = request
                self._numbers[request] = self._next_number
                self._next_number += 1
        return np.fromiter(map(self._numbers.__getitem__, requests), np.int32, len(requests))

    def _forget(self, request: str) -> int:
        """Take the number away from a request and return it; `_UNKNOWN` if the request has none."""
        if (name := self._ids.pop(request, None)) is None:
            return _UNKNOWN
        number, self._numbers[name] = self._numbers[name], _UNKNOWN
        self._gone.append(name)
        return number

    def _copy_to_host(self) -> None:
        """Copy the steps that are complete, and free their memory on the device."""
        steps: list[_Step] = []
        while self._steps and ((done := self._steps[0].done) is None or done.query()):
            steps.append(self._steps.popleft())
        if not self._steps:
            self._room = torch.empty(0, device=self._device)
        if steps:
            with torch.cuda.stream(self._copies):  # on the current stream it would wait for the step under way
                logprobs = torch.cat([step.logprobs for step in steps]).cpu().numpy()
            rows = np.concatenate([step.rows for step in steps], axis=1)
            sampled = rows[0] != _UNKNOWN
            self._logprobs = np.concatenate([self._logprobs, logprobs[sampled]])
            self._rows = np.concatenate([self._rows, rows[:, sampled]], axis=1)

    def _owners(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Return for each token on the host the index in `numbers` of its request.

        `_KEPT` for requests that are not among them, `_UNKNOWN` for requests that are gone.
        """
        oldest = int(self._rows[0].min(initial=self._next_number))
        by_number = np.full(self._next_number - oldest, _UNKNOWN, np.int64)
        for number in self._numbers.values():
            if number >= oldest:
                by_number[number - oldest] = _KEPT
        for index, number in enumerate(numbers):
            if number >= oldest:
                by_number[number - oldest] = index
        return by_number[self._rows[0] - oldest]


def _run_lengths(values: NDArray[np.int32]) -> list[int]:
    """Encode runs of equal values: value, length of its run, next value, and so on."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return np.stack([values[starts], np.diff(starts, append=len(values))], axis=1).ravel().tolist()


def why_not(runner: Any) -> str | None:
    """Return why the samples of this runner (`model_runner` of vLLM's worker) cannot be recorded, or None."""
    import vllm
    from vllm import envs
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.sampler import Sampler as NewSampler

    if vllm.__version__ not in _KNOWN_VERSIONS:
        return f"vLLM {vllm.__version__} is none of the versions that are known ({', '.join(_KNOWN_VERSIONS)})"
    if runner.speculative_config is not None:
        return "speculative decoding samples several tokens in a step"
    if type(runner.sampler) not in (Sampler, NewSampler):
        return f"the sampler {type(runner.sampler).__name__} is not known"
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        return "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set, so requests may share a name"
    return None


def record_samples(runner: Any, recorder: LogprobRecorder) -> Callable[[], None]:
    """Record all samples of a runner (see `why_not`) from now on.

    Returns:
        Function that ends it.
    """
    from vllm.v1.sample.sampler import Sampler

    if isinstance(runner.sampler, Sampler):
        return _record_first_runner(runner, recorder)
    return _record_second_runner(runner, recorder)


def _record_first_runner(runner: Any, recorder: LogprobRecorder) -> Callable[[], None]:
    """Record the samples of `v1/worker/gpu_model_runner.py`, the runner for CPUs and for most mixtures of experts."""
    sampler, run_sampler, choose = runner.sampler, runner._sample, runner.sampler.sample
    logprobs = torch.empty(0)

    def choose_and_score(logits: Tensor, metadata: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        nonlocal logprobs
        chosen, of_vocabulary = choose(logits, metadata, *args, **kwargs)
        # vLLM has none if all requests are greedy, which leaves the logits as they are.
        scores = sampler.compute_logprobs(logits) if of_vocabulary is None else of_vocabulary
        logprobs = scores.gather(-1, chosen.long().unsqueeze(-1))[:, 0]
        return chosen, of_vocabulary

    def run_and_record(*args: Any, **kwargs: Any) -> Any:
        output = run_sampler(*args, **kwargs)
        requests = runner.input_batch.req_ids
        positions = runner.optimistic_seq_lens_cpu[: len(requests)].numpy()
        recorder.add(logprobs, requests, positions, ~runner.discard_request_mask.np[: len(requests)])
        return output

    sampler.sample, runner._sample = choose_and_score, run_and_record

    def end() -> None:
        del sampler.sample, runner._sample

    return end


def _record_second_runner(runner: Any, recorder: LogprobRecorder) -> Callable[[], None]:
    """Record the samples of `v1/worker/gpu/model_runner.py`, the runner for dense models on GPUs."""
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    sampler, run_sampler, choose = runner.sampler, runner.sample, runner.sampler.sample
    uses_flashinfer, sampler.use_flashinfer = sampler.use_flashinfer, False  # it does not return the filtered logits
    logprobs = torch.empty(0)

    def choose_and_score(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        nonlocal logprobs
        chosen, logits = choose(*args, **kwargs)
        logprobs = compute_token_logprobs(logits, chosen.unsqueeze(-1))[:, 0]
        return chosen, logits

    def run_and_record(hidden_states: Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = run_sampler(hidden_states, batch, *args, **kwargs)
        positions = batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs]
        recorder.add(logprobs, batch.req_ids, positions, positions >= batch.prefill_len_np)
        return output

    sampler.sample, runner.sample = choose_and_score, run_and_record

    def end() -> None:
        sampler.use_flashinfer = uses_flashinfer
        del sampler.sample, runner.sample

    return end
