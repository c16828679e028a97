"""Passes of which one rank runs out of memory, at different moments."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from policy_cases import (
    NLL,
    assert_equal,
    decoder_layer,
    forward_hook_on_layer,
    full_optimizer,
    full_params,
    make_batch,
    shard,
)
from rank_cases import make_worker
from torch import Tensor

from nemo_offload_rl.errors import UserError

LENGTH = 14


class Graph:
    """Lives as long as any node of a graph that was marked with it."""

    def mark(self, node: Any) -> Graph:
        """Mark a node and those that it leads to, except for the parameters'."""
        waiting, seen = [node], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or type(node).__name__ == "AccumulateGrad":
                continue
            seen.add(node)
            node.metadata["graph"] = self
            waiting += [following for following, _ in node.next_functions]
        return self


@dataclass
class OutOfMemory:
    """Hook on a decoder layer that fails for more tokens than `most_tokens`.

    Attributes:
        moment: "forward", "last" (the forward of the last micro-batch) or "backward" in training; None for none.
            With any, passes without gradients fail too.
    """

    most_tokens: int
    moment: str | None = None
    num_micro_batches: int = 0
    num_seen: int = 0
    num_failures: int = 0
    failed: weakref.ref[Graph] | None = None

    def __call__(self, _layer: Any, _inputs: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if self.moment is None or hidden.numel() <= self.most_tokens * hidden.shape[-1]:
            return
        if not hidden.requires_grad:
            self.fail()
        self.num_seen += 1
        if self.moment == "forward" or (self.moment == "last" and self.num_seen % self.num_micro_batches == 0):
            self.fail(hidden.grad_fn)
        if self.moment == "backward":
            hidden.register_hook(lambda _: self.fail())

    def check(self, _layer: Any, _inputs: Any) -> None:
        """Check, before the layer runs again, that the failed pass has left nothing behind."""
        assert self.failed is None or self.failed() is None, "activations of the failed pass are still in memory"
        self.failed = None

    def fail(self, graph: Any = None) -> None:
        self.num_failures += 1
        if graph is not None:
            self.failed = weakref.ref(Graph().mark(graph))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def goes_on_after_one_rank_ran_out_of_memory(process, folder, moments, *, num_copies, **changes):
    """Steps in which a rank runs out of memory, against steps with the smaller micro-batches.

    `moments` are pairs of a rank and one of `OutOfMemory.moment`, one of each step. Rows of one length, so that all
    are cut alike.
    """
    batches = [replace(make_batch(seed=seed), input_lengths=torch.full((8,), LENGTH)) for seed in range(len(moments))]
    num_rows = 8 // num_copies

    def run(size, hook=None):
        with make_worker(process, folder, train_micro_batch_size=size, logprob_batch_size=size, **changes) as worker:
            handles: list[Any] = []
            if hook is not None:
                handles.append(forward_hook_on_layer(worker, 0, hook))
                handles.append(decoder_layer(worker, 0).register_forward_pre_hook(hook.check))
            found: list[Any] = []
            for (rank, moment), batch in zip(moments, batches, strict=True):
                mine = shard(batch, worker)
                if hook is not None:
                    worker._passes._too_large.clear()
                    hook.moment = moment if process.rank == rank else None
                    hook.num_seen, hook.num_micro_batches = 0, num_rows // size
                worker.offload_before_refit()
                worker.offload_after_refit()
                worker.prepare_for_lp_inference()
                found.append(worker.get_logprobs(mine))
                worker.prepare_for_training()
                result = worker.train(mine, NLL())
                found.append(replace(result, oom_splits=0))
                if hook is not None:
                    assert result.oom_splits == 2 * (num_rows // size)
                    assert (hook.num_failures > 0) is (process.rank == rank)
                    hook.num_failures = 0
            found += [full_params(worker), full_optimizer(worker)]
            if hook is not None:
                ends_on_all_ranks_with_one_error(process, worker, hook, batches[0])
                for handle in handles:
                    handle.remove()
                worker.get_logprobs(shard(batches[0], worker))  # all are connected
            return found

    expected, found = run(size=1), run(size=2, hook=OutOfMemory(LENGTH))
    for left, right in zip(found, expected, strict=True):
        if isinstance(left, dict):
            assert_equal(left, right)
        else:
            assert torch.equal(left, right) if isinstance(left, Tensor) else left == right


def ends_on_all_ranks_with_one_error(process, worker, hook, batch):
    """One row that is too long for the second rank."""
    hook.most_tokens, hook.moment = 0, "backward" if process.rank == 1 else None
    with pytest.raises(UserError, match=r"a training pass over row 0 of \d+ \(14 tokens\) alone") as raised:
        worker.train(shard(batch, worker), NLL())
    texts: list[Any] = [None] * process.world_size
    torch.distributed.all_gather_object(texts, str(raised.value))
    assert len(set(texts)) == 1
