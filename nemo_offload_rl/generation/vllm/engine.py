"""Runs vLLM's `LLM` in this process as a plain class, which `distributed` wraps in a Ray actor."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.generation.vllm.base import VllmEngineBase, start_error
from nemo_offload_rl.generation.vllm.engine_args import engine_args
from nemo_offload_rl.generation.vllm.requests import (
    completion_from_output,
    recorded_tokens,
    sampled_tokens,
    sampling_params,
)
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion, Finished
from nemo_offload_rl.utils.liveness import show_progress

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


class VllmEngine(VllmEngineBase):
    """An `LLM` of vLLM as a `GenerationEngine`; starts awake, with dummy weights.

    Args:
        settings: The engine's settings. `vllm_kwargs` may override anything, such as `load_format`.

    Raises:
        ConfigError: The model folder is missing, or the KV cache cannot hold one sequence of `max_model_len`.
    """

    def __init__(self, settings: VllmSettings) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        arguments = engine_args(settings, device_type=current_platform.device_type)
        can_sleep = arguments.get("enable_sleep_mode", False)
        super().__init__(settings, can_sleep, arguments["load_format"] != "dummy")
        self._places: dict[str, tuple[int, int]] = {}  # by request, of `begin_generation`
        try:
            self._llm: LLM | None = LLM(**arguments)
        except ValueError as error:
            raise start_error(error, settings) from error
        self._rpc("dump_stacks_on_signal", ())
        self.record_logprobs(True)

    def shutdown(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()

    @property
    def _engine(self) -> LLM:
        if self._llm is None:
            raise RuntimeError("The vLLM engine was shut down")
        return self._llm

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int
    ) -> list[list[Completion]]:
        with self.deaths_told():
            params = [self._params(sampling, num_samples, position) for position in range(len(prompts))]
            requests = [self._add(prompt, of_prompt) for prompt, of_prompt in zip(prompts, params, strict=True)]
            finished: dict[str, RequestOutput] = {}
            while len(finished) < len(requests):
                finished.update((output.request_id, output) for output in self._step())
            return self._completions([finished[request] for request in requests])

    def _begin(self, prompt: Sequence[int], sampling: SamplingSettings, place: tuple[int, int]) -> None:
        self._places[self._add(prompt, self._params(sampling, num_samples=1, position=0))] = place

    def _take_finished(self, wait_s: float) -> list[Finished]:
        until_s = time.monotonic() + wait_s
        outputs: list[RequestOutput] = []
        while len(outputs) < len(self._places):
            outputs += self._step()
            if time.monotonic() >= until_s:
                break
        places = [self._places.pop(output.request_id) for output in outputs]
        return [(*place, one) for place, (one,) in zip(places, self._completions(outputs), strict=True)]

    def _params(self, sampling: SamplingSettings, num_samples: int, position: int) -> SamplingParams:
        return sampling_params(sampling, num_samples, position, records_logprobs=self._records_logprobs)

    def _add(self, prompt: Sequence[int], params: SamplingParams) -> str:
        """Add a request and return its name."""
        from vllm import TokensPrompt

        tokens = TokensPrompt(prompt_token_ids=list(prompt))
        (name,) = self._engine.enqueue([tokens], [params], self._adapters, use_tqdm=False)
        return name.partition("-")[0]  # vLLM adds random characters, which its outputs do not have

    def _step(self) -> Iterator[RequestOutput]:
        """Generate the next token of each running response; yield the requests that have finished."""
        from vllm import RequestOutput

        for output in self._engine.llm_engine.step():
            if isinstance(output, RequestOutput) and output.finished:
                show_progress()
                yield output

    def _completions(self, outputs: Sequence[RequestOutput]) -> list[list[Completion]]:
        """Return the completions of requests that have finished."""
        if not (self._records_logprobs and outputs):
            return [[completion_from_output(sample) for sample in output.outputs] for output in outputs]
        wanted = [list(astuple(response)) for output in outputs for response in sampled_tokens(output)]
        recorded = recorded_tokens(self._rpc("take_logprobs", (wanted, [])))
        return [[completion_from_output(sample, next(recorded)) for sample in output.outputs] for output in outputs]

    def _wake_up(self, tags: list[str]) -> None:
        with self.deaths_told():
            self._engine.wake_up(tags=tags)

    def _sleep(self, level: int) -> None:
        with self.deaths_told():
            self._engine.sleep(level=level)

    def _rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        with self.deaths_told():
            return self._engine.collective_rpc(method, args=args)

    def _reset_prefix_cache(self) -> bool:
        with self.deaths_told():
            return self._engine.reset_prefix_cache()

    def _workers_have_failed(self) -> bool:
        if self._llm is None:
            return False
        # A core in its own process has its executor there, and raises another error when it ends.
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        return core is not None and getattr(core.model_executor, "is_failed", False)
