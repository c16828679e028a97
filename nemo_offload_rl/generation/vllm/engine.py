"""Runs vLLM's `LLM` in this process as a plain class, which `distributed` wraps in a Ray actor."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nemo_offload_rl.generation.vllm.base import VllmEngineBase, start_error
from nemo_offload_rl.generation.vllm.engine_args import engine_args
from nemo_offload_rl.generation.vllm.requests import completion_from_output, sampling_params
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion
from nemo_offload_rl.utils.liveness import show_progress

if TYPE_CHECKING:
    from vllm import LLM


class _Progress(tqdm):
    """Counts finished responses for vLLM, and reports them to watchers of this process instead of the terminal."""

    monitor_interval = 0  # no thread

    def update(self, n: float | None = 1) -> bool | None:
        """Count a prompt whose responses have finished; vLLM calls it."""
        show_progress()
        return super().update(n)


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
        try:
            self._llm: LLM | None = LLM(**arguments)
        except ValueError as error:
            raise start_error(error, settings) from error
        self._rpc("dump_stacks_on_signal", ())

    def shutdown(self) -> None:
        """See `GenerationEngine`."""
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
        from vllm import TokensPrompt

        progress: Any = partial(_Progress, file=StringIO(), mininterval=math.inf)
        with self.deaths_told():
            outputs = self._engine.generate(
                [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts],
                [sampling_params(sampling, num_samples, position) for position in range(len(prompts))],
                use_tqdm=progress,
            )
        return [[completion_from_output(sample) for sample in output.outputs] for output in outputs]

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
