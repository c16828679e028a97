"""Schedulers of the engines; vLLM calls `rollout_scheduler` by name (`scheduler_cls`).

Steps of decoding take less time than vLLM's, see `decode_steps.py`.

**Kept blocks.** KV blocks of requests can be kept on the host while the engine sleeps. A request that runs goes back to
the queue with its blocks and the number of its computed tokens. vLLM admits it from there without computing them again,
as it does after it has received blocks from another engine. The workers are then sent everything about the request
anew, so nothing of it but the contents of its blocks has to survive the sleep. The block ids stay, so `KeptKv` copies
these blocks out and back.

vLLM's own OffloadingConnector is no substitute. While it decodes, it copies every full block of every response to the
host, where only those of the few unfinished ones are needed. It looks them up by hash, so the last, partly filled block
of each response is lost and computed again with other weights. It needs a GPU, so no test on a CPU could see an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from nemo_offload_rl.generation.vllm.decode_steps import AsyncDecodeScheduler, DecodeScheduler


@dataclass(frozen=True)
class KeptKvSettings:
    """Settings of kept blocks, in vLLM's `additional_config`.

    Attributes:
        limit_bytes: Most bytes of blocks that each worker keeps.
    """

    limit_bytes: int

    def compute_hash(self) -> str:
        """Return the part of vLLM's compile-cache key for these settings: empty, since they change no compiled code."""
        return ""


class _Keeping(DecodeScheduler):
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> Any:
        """Drop cached prefixes, whose blocks will lose their contents, and stop the requests that run.

        While requests run, vLLM refuses this, or takes their blocks away if `reset_running_requests` is true. Without
        that argument, running requests here go back to the queue. The oldest keep their blocks, as many as the limit
        allows; the others lose theirs.

        Returns:
            Ids of the blocks to keep, [N] integers.
        """
        if reset_running_requests:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        while self.running:
            self._queue(self.running.pop())
        self.prev_step_scheduled_req_ids.clear()
        pool = self.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
        return self._keep([request for request in self.waiting if request.num_computed_tokens])

    def _queue(self, request: Request) -> None:
        """Put a request that runs in front of the queue, as preemption does, with its blocks."""
        self._inflight_prefills.discard(request)
        request.status = RequestStatus.PREEMPTED
        request.spec_token_ids = []
        self.waiting.prepend_request(request)
        self.reset_preempted_req_ids.add(request.request_id)

    def _keep(self, holders: Sequence[Request]) -> list[int]:
        """Choose which requests keep their blocks, and free those of the others."""
        manager, config = self.kv_cache_manager, self.kv_cache_config
        num_blocks, num_groups = config.num_blocks, len(config.kv_cache_groups)
        block_bytes = sum(tensor.size for tensor in config.kv_cache_tensors) // num_blocks
        settings: Any = self.vllm_config.additional_config  # `KeptKvSettings`
        most = settings.limit_bytes // block_bytes
        null = manager.block_pool.null_block.block_id
        kept: list[Request] = []
        kept_ids: set[int] = set()
        for request in holders:
            ids = {block for group in manager.get_block_ids(request.request_id) for block in group} - {null}
            # All that are kept must be admitted at once, and each may need one more block of each group for that.
            rest = num_blocks - 1 - len(kept_ids | ids) - num_groups * (len(kept) + 1)
            is_decoding = request.num_computed_tokens == request.num_tokens - 1
            if is_decoding and rest >= 0 and len(kept_ids | ids) <= most:
                kept.append(request)
                kept_ids |= ids
            else:
                manager.free(request)
                request.num_computed_tokens = 0
                request.num_preemptions += 1
        # In front of those that need many blocks, since the first one that finds no room stops the admission.
        self.waiting.remove_requests(kept)
        for request in reversed(kept):
            self.waiting.prepend_request(request)
        return sorted(kept_ids)


class _AsyncKeeping(_Keeping, AsyncScheduler):
    pass


def rollout_scheduler(*, vllm_config: Any, **arguments: Any) -> Scheduler:
    """Make the scheduler of an engine; arguments as of vLLM's."""
    is_async = vllm_config.scheduler_config.async_scheduling
    if isinstance(vllm_config.additional_config, KeptKvSettings):
        kind = _AsyncKeeping if is_async else _Keeping
    else:
        kind = AsyncDecodeScheduler if is_async else DecodeScheduler
    return kind(vllm_config=vllm_config, **arguments)
