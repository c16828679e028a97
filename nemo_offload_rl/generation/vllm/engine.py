"""vLLM inside this process, as a plain class. `distributed` wraps it in a Ray actor.

State, all of it explicit: `_awake` holds which of vLLM's two kinds of memory are resident, `_weights_valid` whether the
weights are those of a finished refit (or of a checkpoint). A CPU engine cannot sleep, so there the calls only keep the
state, and misuse (generating while asleep, or after weights were discarded) fails on CPU as it would on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.generation.interfaces import Completion, SamplingSettings
from nemo_offload_rl.generation.settings import VllmSettings
from nemo_offload_rl.generation.vllm.engine_args import engine_args
from nemo_offload_rl.generation.vllm.requests import check_prompts, completion_from_output, sampling_params
from nemo_offload_rl.generation.vllm.wire import bucket_to_wire
from nemo_offload_rl.weight_sync.errors import RefitError
from nemo_offload_rl.weight_sync.interfaces import WeightBucket

if TYPE_CHECKING:
    from vllm import LLM

ALL_TAGS = ("weights", "kv_cache")


class VllmEngine:
    """An `LLM` of vLLM behind `GenerationEngine`; it starts awake, with dummy weights unless told otherwise.

    Args:
        settings: The engine. `vllm_kwargs` may override anything, `load_format` ("dummy" without it) included.

    Raises:
        ConfigError: The model folder is missing, or the KV cache cannot hold one sequence of `max_model_len`.
    """

    def __init__(self, settings: VllmSettings) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        self._settings = settings
        self._can_sleep = current_platform.is_cuda()
        arguments = engine_args(settings, device_type=current_platform.device_type)
        try:
            self._llm: LLM | None = LLM(**arguments)
        except ValueError as error:
            raise start_error(error, settings) from error
        self._weights_valid = arguments["load_format"] != "dummy"
        self._awake = set(ALL_TAGS)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        """See `GenerationEngine`. With `sampling.seed`, sample j of prompt i draws from seed + i * num_samples + j.

        Raises:
            DataError: A prompt is empty or leaves no room for a token.
            RuntimeError: The engine sleeps, or its weights are not those of a finished refit.
        """
        self._check_ready()
        check_prompts(prompts, self._settings.max_model_len)
        if not prompts:
            return []
        outputs = self._engine.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [sampling_params(sampling, num_samples, position) for position in range(len(prompts))],
            use_tqdm=False,
        )
        return [[completion_from_output(sample) for sample in output.outputs] for output in outputs]

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        """See `GenerationEngine`."""
        wanted = ALL_TAGS if tags is None else tuple(tags)
        unknown = set(wanted) - set(ALL_TAGS)
        if unknown:
            raise ValueError(f"vLLM has no memory tagged {sorted(unknown)}; the tags are {list(ALL_TAGS)}")
        asleep = [tag for tag in wanted if tag not in self._awake]
        if asleep and self._can_sleep:
            self._engine.wake_up(tags=asleep)
        self._awake.update(asleep)

    def finish_generation(self, discard_weights: bool) -> None:
        """See `GenerationEngine`. The KV cache is dropped in both cases."""
        if not self._awake:
            return
        # vLLM cannot put half an engine to sleep: it would unmap twice what sleeps already.
        self.prepare_for_generation()
        if self._can_sleep:
            self._engine.sleep(level=2 if discard_weights else 1)
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
        self._raise_first(self._engine.collective_rpc("refit_load_bucket", args=(bucket_to_wire(bucket),)))

    def finish_refit(self) -> None:
        """See `GenerationEngine`.

        Raises:
            RefitError: Weights never came; the message names them.
        """
        self._raise_first(self._engine.collective_rpc("refit_finish"))
        if not self._engine.reset_prefix_cache():
            raise RefitError("vLLM kept its prefix cache, because requests are running")
        self._weights_valid = True

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

    def _check_ready(self) -> None:
        if not self._weights_valid:
            raise RuntimeError("generate was called before a refit had brought the weights")
        asleep = [tag for tag in ALL_TAGS if tag not in self._awake]
        if asleep:
            raise RuntimeError(f"generate was called while {' and '.join(asleep)} sleep: call prepare_for_generation")

    @staticmethod
    def _raise_first(messages: Sequence[str | None]) -> None:
        for message in messages:
            if message is not None:
                raise RefitError(message)


def start_error(error: ValueError, settings: VllmSettings) -> Exception:
    """A `ConfigError` where the user's numbers are the reason, else the error itself."""
    text = " ".join(str(error).split())
    if "KV cache" in text or "kv cache" in text:
        return ConfigError(
            f"vLLM's KV cache does not fit policy.generation.vllm_cfg.max_model_len={settings.max_model_len}: {text}"
        )
    return error
