"""A worker of vLLM that loses its KV cache in a sleep also on a CPU, where sleeping frees nothing."""

from __future__ import annotations

from nemo_offload_rl.generation.vllm.worker_extension import WorkerExtension

BY_NAME = f"{__name__}.SpoilingExtension"
# Not NaN: the kernel for CPUs multiplies what has not been written yet in a block by a weight of 0.
_GARBAGE = 1e3


class SpoilingExtension(WorkerExtension):
    """For `vllm_kwargs.worker_extension_cls`."""

    _num_kept = 0

    def put_away_kv(self, block_ids: list[int]) -> str | None:
        """Put blocks away, then overwrite all of the cache."""
        problem = super().put_away_kv(block_ids)
        for cache in self.model_runner.kv_caches:
            cache.fill_(_GARBAGE)
        self._num_kept = len(block_ids)
        return problem

    def num_kept(self) -> int:
        """Blocks that the last call put away."""
        return self._num_kept
