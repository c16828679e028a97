"""Translates prompts, sampling and completions for vLLM, and tracks the version of the engine's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput

_SEED_LIMIT = 2**63


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


def sampling_params(sampling: SamplingSettings, num_samples: int, position: int) -> SamplingParams:
    """Return vLLM's sampling parameters for the prompt at `position` of its batch.

    vLLM adds the sample's number to the seed, so each prompt's seed is `num_samples` larger than the previous one's.
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
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop_strings),
    )


def completion_from_output(output: CompletionOutput) -> Completion:
    """Return the tokens and their sampler's logprobs, including the token that ended the response."""
    from vllm.logprobs import FlatLogprobs

    token_ids, flat = list(output.token_ids), output.logprobs
    if flat is None:
        assert not token_ids
        return Completion([], [], output.finish_reason or "abort")
    assert isinstance(flat, FlatLogprobs)
    # Each position begins with the sampled token; with `logprobs=0` there is no other.
    assert [flat.token_ids[start] for start in flat.start_indices] == token_ids
    return Completion(
        token_ids, [flat.logprobs[start] for start in flat.start_indices], output.finish_reason or "abort"
    )
