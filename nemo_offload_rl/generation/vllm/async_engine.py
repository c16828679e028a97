"""Runs vLLM's `AsyncLLM` as a `GenerationEngine`, for rollouts that ask for one response at a time.

`AsyncLLM` runs on an event loop in its own thread, so callers may be synchronous code, threads, or coroutines of any
other loop. Its engine core is always another process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import signal
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.generation.served_rollouts import ServedCall
from nemo_offload_rl.generation.vllm.base import VllmEngineBase, start_error
from nemo_offload_rl.generation.vllm.engine_args import engine_args
from nemo_offload_rl.generation.vllm.requests import (
    Answers,
    ServedWeights,
    cache_salt,
    check_prompts,
    sampling_params,
)
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion, Finished
from nemo_offload_rl.protocols.refit import WeightBucket
from nemo_offload_rl.utils.liveness import show_progress

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from nemo_offload_rl.generation.vllm.http_server import HttpServer

T = TypeVar("T")
_SHOW_PERIOD_S = 5.0


class AsyncVllmEngine(VllmEngineBase):
    """A `GenerationEngine` that also serves single prompts concurrently; a `OneEngine` and `PausingEngine` too.

    Args:
        settings: As for `VllmEngine`.

    Raises:
        ConfigError: The model folder is missing, or the KV cache cannot hold one sequence of `max_model_len`.
    """

    def __init__(self, settings: VllmSettings) -> None:
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_args(settings, device_type=current_platform.device_type)
        can_sleep = arguments.get("enable_sleep_mode", False)
        super().__init__(settings, can_sleep, arguments["load_format"] != "dummy")
        self._request_ids = itertools.count()
        self._places: dict[concurrent.futures.Future[list[Completion]], tuple[int, int]] = {}  # of `begin_generation`
        self._served = ServedWeights()
        self._answers = Answers(self._take_logprobs)
        self._pausing = threading.Condition()  # guards the two below, and the state that calls check
        self._recomputes: bool | None = None  # while paused: whether KV caches are computed again
        self._has_put_away = False  # from before a sleep until responses go on
        self._shows_waiting: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-async", daemon=True)
        # The engine core inherits the mask of this thread. It would end at Ctrl-C; the driver decides how a run ends.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        self._llm: AsyncLLM | None = None

        async def start() -> AsyncLLM:
            # vLLM's sizes for `LLM`; without it 128 responses run at once, not 1024 as on GPUs of 70 GiB and more.
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
            _fail_calls_at_end(llm.engine_core)
            return llm

        try:
            self._llm = self._wait(start())
        except ValueError as error:
            raise start_error(error, settings) from error
        finally:
            if self._llm is None:
                self._stop_loop()
        self._rpc("dump_stacks_on_signal", ())
        self.record_logprobs(True)
        self._server: HttpServer | None = None
        if settings.endpoint is not None:
            try:
                self._server = self._serve()
            finally:
                if self._server is None:
                    self.shutdown()

    def record_logprobs(self, on: bool) -> None:
        super().record_logprobs(on)
        self._answers.records_logprobs = self._records_logprobs

    def generate_each(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingSettings]
    ) -> list[Completion]:
        """See `OneEngine`; errors as in `generate`."""
        self.check_ready()
        check_prompts(prompts, self._settings.max_model_len)

        async def all_of_them() -> list[list[Completion]]:
            pairs = zip(prompts, samplings, strict=True)
            return await asyncio.gather(*(self._one(prompt, self.effective(each), 1, 0) for prompt, each in pairs))

        return [completion for (completion,) in self._wait(all_of_them())]

    def num_in_progress(self) -> int:
        """Return how many responses have begun or wait, and have not finished."""
        return self._engine.output_processor.get_num_unfinished_requests()

    def abort_generation(self) -> None:
        async def abort() -> None:
            # A pause tells all tokens, which vLLM's aborts do not have (`decode_steps.py`).
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            await self._engine.pause_generation(mode="abort", clear_cache=False)
            await self._engine.resume_generation()

        self._wait(abort())

    def pause_generation(self, recompute_kv_cache: bool) -> None:
        with self._pausing:
            self._recomputes = recompute_kv_cache

        async def hold() -> None:
            self._served.runs.clear()
            await self._engine.pause_generation(mode="keep", clear_cache=False)

        self._wait(hold())

    def resume_generation(self) -> None:
        async def go_on() -> None:
            await self._engine.resume_generation()
            self._served.runs.set()

        self._wait(go_on())
        with self._pausing:
            self._recomputes, self._has_put_away = None, False
            self._pausing.notify_all()

    def check_ready(self) -> None:
        """See `VllmEngineBase`; waits while the engine is paused, or sleeps with unfinished responses put away."""
        with self._pausing:
            self._pausing.wait_for(lambda: self._recomputes is None and not self._has_put_away)
            super().check_ready()

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        """See `GenerationEngine`; once it is ready, the HTTP server answers, and responses put away go on."""
        super().prepare_for_generation(tags)
        self._open_gate()
        self._bring_back()

    def finish_generation(self, discard_weights: bool) -> None:
        """See `GenerationEngine`; puts unfinished responses away if the settings say so.

        The HTTP server aborts open requests, and refuses until the engine is ready again.

        Raises:
            ConfigError: The KV cache is not laid out so that parts of it can be put away.
        """
        self._close_gate()
        if self._settings.kept_kv_bytes is not None and self.is_ready and not self._has_put_away:
            self._put_away()
        super().finish_generation(discard_weights)

    def load_bucket(self, bucket: WeightBucket) -> None:
        """See `GenerationEngine`; the HTTP server refuses until the refit has finished, unless the engine is paused."""
        if self._recomputes is None:
            self._close_gate()
        super().load_bucket(bucket)

    def finish_refit(self, version: int = 0) -> None:
        """See `GenerationEngine`; raises the number of refits by one."""
        super().finish_refit(version)
        self._served.version += 1
        self._open_gate()
        self._bring_back()

    def endpoint_url(self) -> str:
        """URL of the HTTP server, without a path."""
        return self._endpoint.url

    def open_rollouts(self, rollouts: Mapping[str, SamplingSettings]) -> None:
        """Let the HTTP server answer calls of these rollouts, given by name."""
        self._wait(self._endpoint.open_rollouts(rollouts))

    def take_rollouts(self, names: Collection[str]) -> dict[str, list[ServedCall]]:
        """Close rollouts and return their calls.

        Also waits for vLLM's workers to answer, which finds a hung engine; agents would only time out.
        """
        self._rpc("answer", ())
        return self._wait(self._endpoint.take_rollouts(names))

    def shutdown(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self._wait(server.stop())
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None
            self._stop_loop()

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise RuntimeError("The vLLM engine was shut down")
        return self._llm

    @property
    def _endpoint(self) -> HttpServer:
        if self._server is None:
            raise RuntimeError("The engine has no HTTP server: policy.generation.vllm_cfg.expose_http_server is false")
        return self._server

    def _serve(self) -> HttpServer:
        from nemo_offload_rl.generation.vllm.http_server import HttpServer

        server = HttpServer(self._engine, self._settings, self._served, self._answers, self._adapters)
        self._wait(server.start())
        return server

    def _open_gate(self) -> None:
        if self._server is not None and self.is_ready:
            self._wait(self._server.open_gate())

    def _close_gate(self) -> None:
        if self._server is not None:
            self._wait(self._server.close_gate())

    def _put_away(self) -> None:
        """Stop all responses, hold new calls, and copy the KV blocks with which the responses go on to the host."""
        with self._pausing:
            self._has_put_away = True

        async def stop() -> Any:
            self._served.runs.clear()
            self._shows_waiting = asyncio.create_task(self._show_waiting())
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            return await self._engine.reset_prefix_cache()

        blocks = self._wait(stop())  # see `schedulers.py`
        for problem in self._rpc("put_away_kv", (blocks,)):
            if problem is not None:
                raise ConfigError(problem)

    def _bring_back(self) -> None:
        """Copy the KV blocks that were put away back and let responses go on, if the engine is ready."""
        if self._has_put_away and self.is_ready:
            self._rpc("bring_back_kv", ())
            self.resume_generation()

    async def _show_waiting(self) -> None:
        """Show progress while responses wait on purpose, so that their calls do not count as hung."""
        while not self._served.runs.is_set():
            show_progress()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._served.runs.wait(), _SHOW_PERIOD_S)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self.deaths_told():
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _one(
        self, prompt: Sequence[int], sampling: SamplingSettings, num_samples: int, position: int
    ) -> list[Completion]:
        from vllm import RequestOutput, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = sampling_params(sampling, num_samples, position, records_logprobs=self._records_logprobs)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        version = await self._served.next_version()
        tokens = TokensPrompt(prompt_token_ids=list(prompt), cache_salt=cache_salt(version))
        request, last = f"request-{next(self._request_ids)}", None
        try:
            async for output in self._engine.generate(tokens, params, request, lora_request=self._adapters):
                last = output
        finally:
            if last is None:  # cancelled
                self._answers.drop(request, num_samples)
        assert isinstance(last, RequestOutput)
        completions = await self._answers.completions(last)
        show_progress()
        return completions

    async def _take_logprobs(self, responses: list[list[Any]], dropped: list[str]) -> list[Any]:
        return await self._engine.collective_rpc("take_logprobs", args=(responses, dropped))

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int
    ) -> list[list[Completion]]:
        async def all_of_them() -> list[list[Completion]]:
            calls = [self._one(prompt, sampling, num_samples, position) for position, prompt in enumerate(prompts)]
            return await asyncio.gather(*calls)

        return self._wait(all_of_them())

    def _begin(self, prompt: Sequence[int], sampling: SamplingSettings, place: tuple[int, int]) -> None:
        coroutine = self._one(prompt, sampling, num_samples=1, position=0)
        self._places[asyncio.run_coroutine_threadsafe(coroutine, self._loop)] = place

    def _take_finished(self, wait_s: float) -> list[Finished]:
        waits_for = list(self._places)
        done = concurrent.futures.wait(waits_for, wait_s, concurrent.futures.FIRST_EXCEPTION).done
        # Responses that finished before the engine died come first; the next call raises its error.
        answered = [future for future in done if future.exception() is None] or done
        found = [(future.result()[0], self._places.pop(future, None)) for future in answered]
        return [(*place, completion) for completion, place in found if place is not None]  # else of another call

    # vLLM's engine would drop the blocks of all responses before a sleep, and let the responses go on when the last tag
    # wakes. So if responses were put away, its workers are told to sleep and wake without it.

    def _wake_up(self, tags: list[str]) -> None:
        if self._has_put_away:
            self._rpc("wake_up", (tags,))
        else:
            self._wait(self._engine.wake_up(tags))

    def _sleep(self, level: int) -> None:
        if self._has_put_away:
            self._rpc("sleep", (level,))
        else:
            self._wait(self._engine.sleep(level))

    def _rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return self._wait(self._engine.collective_rpc(method, args=args))

    def _reset_prefix_cache(self) -> bool:
        if self._has_put_away:
            return True  # `_put_away` has done it
        if self._recomputes is False and self._engine.output_processor.has_unfinished_requests():
            # Unfinished requests keep their blocks. Later requests have another salt, so they do not read them.
            return True
        answer = self._wait(self._engine.reset_prefix_cache(reset_running_requests=self._recomputes is True))
        return answer is not False  # `schedulers.py` returns blocks


def _fail_calls_at_end(client: Any) -> None:
    """Make calls of the engine core fail when it dies: vLLM 0.25.1 fails requests only, and calls would wait for ever.

    Args:
        client: The client of the core, on whose event loop this is called.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    def fail(task: asyncio.Task[None]) -> None:
        for call in client.utility_results.values():
            if not call.done():
                call.set_exception(EngineDeadError())

    client.resources.output_queue_task.add_done_callback(fail)
