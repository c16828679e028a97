"""Scheduler whose steps of decoding take the host less time than vLLM's.

vLLM 0.25.1 handles every request anew in each step: it asks for blocks, looks for reasons to stop, and makes an object
with the request's new token, which the caller's side takes apart. In most steps of a rollout each request gets one more
token, and nothing else happens. `DecodeScheduler` does this in a few short loops, with the same blocks and tokens.

A request is quiet if its caller reads only the whole response, without logprobs from vLLM or stop strings. The caller
gets the first token at once, and the others together when the response ends or the engine pauses. Whatever is unusual
is left to vLLM's scheduler.

For 512 requests, `schedule`, `update_from_output` and `process_outputs` take 0.17 times vLLM's seconds together
(`benchmarks/scheduler_pace.py`).
"""

from dataclasses import dataclass, replace
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


def _block_tokens(manager: KVCacheManager) -> int | None:
    """Return the number of tokens of a KV block; None unless all layers keep all tokens, in blocks of one size."""
    groups = manager.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        return None
    (of_group,) = manager.coordinator.single_type_managers
    return of_group.block_size if of_group.block_size == manager.block_pool.hash_block_size else None


@dataclass(slots=True)
class _Decoded:
    """A request that gets one token in each step once its prompt has been read.

    Attributes:
        is_quiet: The caller reads only the whole response.
        ends: Tokens that may end the response.
        most_tokens: Tokens of prompt and response at which it ends.
        num_told: Number of tokens that the caller of a quiet request has received.
    """

    request: Request
    is_quiet: bool
    ends: frozenset[int]
    most_tokens: int
    num_told: int = 0

    @property
    def is_owed(self) -> bool:
        return self.is_quiet and len(self.request._output_token_ids) > self.num_told

    def tell(self) -> list[int]:
        """Return the tokens that the caller has not received yet, and count them as received."""
        begin, self.num_told = self.num_told, len(self.request._output_token_ids)
        return self.request._output_token_ids[begin:]


class DecodeScheduler(Scheduler):
    """See the module; `AsyncDecodeScheduler` is for engines that schedule a step before they know the last tokens."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._decoded: dict[str, _Decoded] = {}
        self._is_async = isinstance(self, AsyncScheduler)
        # With any of these a step of decoding does more than append a token to each request.
        self._is_short = not (
            self.log_stats
            or self.num_spec_tokens
            or self.num_sampled_tokens_per_step != 1
            or self.connector is not None
            or self.ec_connector is not None
            or self.use_pp
            or self.is_encoder_decoder
            or self.enable_return_routed_experts
        )
        self._block_tokens = _block_tokens(self.kv_cache_manager) if self._is_short else None

    def add_request(self, request: Request) -> None:
        """Take a request, as vLLM's scheduler does."""
        super().add_request(request)
        params = request.sampling_params
        is_new = self.requests.get(request.request_id) is request
        is_usual = not (request.use_structured_output or request.resumable or request.mm_features)
        if params is not None and is_new and is_usual and self._is_short:
            is_quiet = params.output_kind is RequestOutputKind.FINAL_ONLY and not (
                params.stop
                or params.num_logprobs is not None
                or params.prompt_logprobs is not None
                or params.repetition_detection is not None
            )
            ends = frozenset(params.stop_token_ids or ())
            if params.eos_token_id is not None:
                ends |= {params.eos_token_id}
            most_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
            self._decoded[request.request_id] = _Decoded(request, is_quiet, ends, most_tokens)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Choose the requests of the next step, with their blocks."""
        chosen = [] if throttle_prefills else self._decoding()
        if not chosen:
            return super().schedule(throttle_prefills)
        names = [request.request_id for request in chosen]
        mine, running, most_tokens = self._advance(chosen, names), self.running, self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens -= len(chosen)
        # vLLM skips the chosen requests. Where no others wait, it gets an empty list, and need not look at each.
        is_alone = not (self.waiting or self.skipped_waiting)
        if is_alone:
            self.running = []
        step = super().schedule()
        self.max_num_scheduled_tokens = most_tokens
        if is_alone:
            self.running = running
            step.num_common_prefix_blocks = self.kv_cache_manager.get_num_common_prefix_blocks(running[0].request_id)
        if self._is_async:
            for request in chosen:
                request.num_output_placeholders += 1
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(names)
        others = step.scheduled_cached_reqs
        mine.req_ids += others.req_ids
        mine.resumed_req_ids |= others.resumed_req_ids
        mine.all_token_ids |= others.all_token_ids
        mine.new_block_ids += others.new_block_ids
        mine.num_computed_tokens += others.num_computed_tokens
        mine.num_output_tokens += others.num_output_tokens
        step.scheduled_cached_reqs = mine
        step.num_scheduled_tokens = dict.fromkeys(names, 1) | step.num_scheduled_tokens
        step.total_num_scheduled_tokens += len(chosen)
        return step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append the tokens of a step, and return what callers are told."""
        rest = scheduler_output.num_scheduled_tokens
        if self._block_tokens is not None and model_runner_output.sampled_token_ids:
            rest = self._append(rest, model_runner_output, self._block_tokens)
            scheduler_output = replace(scheduler_output, num_scheduled_tokens=rest)
        decoded = {name: self._decoded[name] for name in rest if name in self._decoded}  # vLLM forgets those that end
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client, told in list(outputs.items()):
            told.outputs = [output for output in told.outputs if _is_told(output, decoded.get(output.request_id))]
            if not (told.outputs or told.finished_requests or told.scheduler_stats):
                del outputs[client]
        if self._pause_state is PauseState.PAUSED_ALL:
            for name, each in self._decoded.items():
                if each.is_owed:
                    of_client = outputs.setdefault(each.request.client_index, EngineCoreOutputs())
                    of_client.outputs.append(EngineCoreOutput(name, each.tell()))
        return outputs

    def has_requests(self) -> bool:
        """Return whether the engine has to make another step; a paused one does so until it has told all tokens."""
        is_paused = self._pause_state is PauseState.PAUSED_ALL
        return super().has_requests() or (is_paused and any(each.is_owed for each in self._decoded.values()))

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        self._decoded.pop(request.request_id, None)

    def _decoding(self) -> list[Request]:
        """Return the requests that get one token each in the next step.

        Empty if a prompt is still being read, or if free blocks may not suffice: vLLM then schedules the whole step.
        """
        size, manager = self._block_tokens, self.kv_cache_manager
        if (
            size is None
            or self._inflight_prefills
            or self._pause_state is not PauseState.UNPAUSED
            or len(self._decoded) < len(self.requests)
            or len(self.running) > self.max_num_scheduled_tokens
        ):
            return []
        chosen: list[Request] = []
        num_full, most_computed = 0, self.max_model_len - 2
        for request in self.running:
            done, lag = request.num_computed_tokens, request.num_output_placeholders
            if lag and done + 2 - lag >= request.num_prompt_tokens + request.max_tokens:
                continue  # its last token is being sampled
            if len(request._all_token_ids) + lag - done != 1 or done > most_computed:
                return []
            num_full += not done % size
            chosen.append(request)
        return chosen if num_full <= manager.block_pool.get_num_free_blocks() else []

    def _advance(self, chosen: list[Request], names: list[str]) -> CachedRequestData:
        """Give requests a slot for their next token, and return them in vLLM's form."""
        size, manager, before = self._block_tokens, self.kv_cache_manager, self.prev_step_scheduled_req_ids
        assert size is not None
        last = size - 1 if manager.enable_caching else size
        blocks: list[tuple[list[int], ...] | None] = [None] * len(chosen)
        computed, num_outputs = [], []
        for index, request in enumerate(chosen):
            done = request.num_computed_tokens
            place = done % size
            if not place or (place == last and not request.num_output_placeholders):
                found = manager.allocate_slots(request, 1)
                assert found is not None
                blocks[index] = found.get_block_ids(allow_none=True)
            computed.append(done)
            num_outputs.append(done + 1 - request.num_prompt_tokens)
            request.num_computed_tokens = done + 1
        all_tokens: dict[str, list[int]] = {}
        if not (self.use_v2_model_runner or before.issuperset(names)):
            all_tokens = {it.request_id: it.all_token_ids.copy() for it in chosen if it.request_id not in before}
        return CachedRequestData(names.copy(), set(), [], all_tokens, blocks, computed, num_outputs)

    def _append(self, scheduled: dict[str, int], output: ModelRunnerOutput, size: int) -> dict[str, int]:
        """Append its token to each request that only goes on; return numbers of tokens of the others, for vLLM."""
        decoded, sampled, places = self._decoded, output.sampled_token_ids, output.req_id_to_index
        is_async, running, rest = self._is_async, RequestStatus.RUNNING, {}
        for name, count in scheduled.items():
            each, tokens = decoded.get(name), sampled[places[name]]
            if each is not None and each.num_told and len(tokens) == 1:
                request, token = each.request, tokens[0]
                length = len(request._all_token_ids) + 1
                is_last = length >= each.most_tokens or token in each.ends
                if not is_last and request.status is running and not request.async_tokens_to_discard:
                    request._output_token_ids.append(token)
                    request._all_token_ids.append(token)
                    place = length % size
                    if not place:
                        request.update_block_hashes()
                    if is_async:
                        request.num_output_placeholders -= 1
                        if place == 1:  # all tokens before this one are computed
                            self.kv_cache_manager.cache_blocks(request, length - 1)
                    continue
            rest[name] = count
        return rest


class AsyncDecodeScheduler(DecodeScheduler, AsyncScheduler):
    """See `DecodeScheduler`."""


def _is_told(output: EngineCoreOutput, decoded: _Decoded | None) -> bool:
    """Return whether the output goes to its caller now; that of a quiet request then gets all tokens not sent yet."""
    if decoded is None or not decoded.is_quiet:
        return True
    if decoded.num_told and output.finish_reason is None:
        return False
    output.new_token_ids = decoded.tell()
    return True
