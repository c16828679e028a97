"""The interface of an inference engine to the driver and the rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.refit import WeightBucket
from nemo_offload_rl.utils.traces import Traced

type Versions = tuple[tuple[int, int], ...]
"""The version of weights that sampled each token, in order: (version, number of tokens). Empty if it is unknown."""


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    Attributes:
        token_ids: Its tokens.
        logprobs: The engine's logprob of each token (see `SamplingSettings`).
        finish_reason: "stop", "length" or "abort".
        versions: See `Versions` and `GenerationEngine.finish_refit`.
        routed_experts: Routing of the prompt's tokens and the response's, without the last one, which the engine did
            not compute ([tokens, layers, experts per token], see `data/batch.py`); None if the engine returns none.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: Versions = ()
    routed_experts: np.ndarray | None = field(default=None, compare=False)

    def cut(self, size: int) -> Completion:
        """Return the first `size` tokens, or all if there are fewer."""
        left, kept = size, list[tuple[int, int]]()
        for version, count in self.versions:
            kept.append((version, min(count, left)))
            left -= kept[-1][1]
        routing, num_cut = self.routed_experts, max(len(self.token_ids) - size, 0)
        return replace(
            self,
            token_ids=self.token_ids[:size],
            logprobs=self.logprobs[:size],
            versions=joined_versions([kept]),
            routed_experts=None if routing is None else routing[: len(routing) - num_cut],
        )

    def continued_by(self, rest: Completion) -> Completion:
        """Return this response with the tokens that another one adds, and that one's end."""
        return Completion(
            [*self.token_ids, *rest.token_ids],
            [*self.logprobs, *rest.logprobs],
            rest.finish_reason,
            joined_versions([self.versions, rest.versions]),
            joined_routing(self.routed_experts, rest.routed_experts),
        )


def joined_versions(parts: Iterable[Iterable[tuple[int, int]]]) -> Versions:
    """Join the versions of consecutive tokens; neighbouring entries of one version become one, empty ones none."""
    found: list[tuple[int, int]] = []
    for part in parts:
        for version, count in part:
            if found and found[-1][0] == version:
                count += found.pop()[1]
            if count:
                found.append((version, count))
    return tuple(found)


def joined_routing(before: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    """Join the routing of a conversation's first tokens with that of a later request, which covers more tokens.

    Args:
        before: Routing of the first tokens; it is kept, since the tokens after these were sampled with it.
        later: Routing from the first token on, of a later request whose prompt begins with those tokens.
    """
    if before is None or later is None:
        return later if before is None else before
    return np.concatenate([before, later[len(before) :]])


type Finished = tuple[int, int, Completion]
"""Place of a prompt, number of the response among the prompt's, and the response."""


class GenerationEngine(Traced, Protocol):
    """One inference engine with all of its tensor-parallel ranks."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        """Return `num_samples` completions for each prompt of token ids, in the prompts' order."""
        ...

    def wait_for_room(self, tags: Sequence[str], extra_bytes: int = 0) -> bool:
        """Wait until the devices have room for `prepare_for_generation` with these tags.

        Args:
            tags: See `prepare_for_generation`.
            extra_bytes: Bytes that the caller allocates next on each device; waited for only briefly.

        Returns:
            Whether `extra_bytes` fit too.
        """
        ...

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        """Wake `weights`, `kv_cache`, or both (None), unless they are awake already."""
        ...

    def finish_generation(self, discard_weights: bool) -> None:
        """Put the engine to sleep; set `discard_weights` if a refit comes before the next generation."""
        ...

    def load_bucket(self, bucket: WeightBucket) -> None:
        """Copy the bucket's tensors into the model; the bucket may be overwritten once this returns."""
        ...

    def finish_refit(self, version: int = 0) -> None:
        """Check that every weight of the model arrived, and drop cached prefixes that the old weights computed.

        Args:
            version: Number of the weights, for `Completion.versions`.
        """
        ...

    def shutdown(self) -> None:
        """End the engine; safe to call twice."""
        ...


class Generates(Protocol):
    """Generates responses: all engines, or one of them."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]: ...


class OneEngine(Generates, Protocol):
    """One engine of several."""

    def generate_each(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingSettings]
    ) -> list[Completion]:
        """Return a completion for each prompt, with a sampling of its own; needs the asynchronous engine."""
        ...


class EngineGroup(GenerationEngine, Protocol):
    """All engines of a run together."""

    @property
    def most_callers(self) -> int:
        """Number of threads that may call `generate` at a time, while other calls are still answered."""
        ...

    def num_in_progress(self) -> int:
        """Return how many responses the engines have begun or queued, and not finished; needs asynchronous engines."""
        ...

    def reserve(self) -> AbstractContextManager[OneEngine]:
        """Return a context with one engine: the one that the fewest callers have reserved now."""
        ...


class PausingEngine(Protocol):
    """An engine that can take new weights in the middle of responses."""

    def abort_generation(self) -> None:
        """End all responses now; callers get the tokens sampled so far, with the `finish_reason` abort."""
        ...

    def pause_generation(self, recompute_kv_cache: bool) -> None:
        """Hold all responses, and all new requests, until `resume_generation`.

        Args:
            recompute_kv_cache: If true, a refit during the pause drops the KV cache, which is then computed again with
                the new weights. If false, running responses keep the KV cache of the old weights. Requests that begin
                after the pause never read the old KV cache.
        """
        ...

    def resume_generation(self) -> None:
        """Continue the held responses and requests."""
        ...
