"""Workers whose model passes through the device part by part, and devices that look at what is on them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from deferred_device import DeferredDevice
from policy_cases import NLL, assert_equal, cycle, full_optimizer, full_params, make_batch, one_rank_worker
from tiny_models import qwen3_config, save_model_folder

from nemo_offload_rl.residency import CpuDevice

in_parts = partial(one_rank_worker, cpu_offload=True, activation_checkpointing=True)
PART_ROWS = ("params/part.", "grads/part.", "optimizer/part.")


def results(worker, num_steps=3):
    """What all passes of some steps gave, with every phase of a step and a reference."""
    seen = []
    worker.prepare_for_training()
    for seed in range(num_steps):
        batch = make_batch(seed=seed)
        cycle(worker, batch)
        worker.prepare_for_lp_inference()
        seen += [worker.get_logprobs(batch), worker.get_reference_logprobs(batch)]
        worker.prepare_for_training()
        seen.append(torch.tensor(worker.evaluate(batch, NLL()).loss))
        result = worker.train(batch, NLL())
        seen.append(torch.tensor([*result.loss, *result.grad_norm, *result.metrics["logprob_min"]]))
    return seen


def steps(worker, num_steps=3):
    """The same, and the state at the end."""
    return results(worker, num_steps), full_params(worker), full_optimizer(worker)


def assert_same_steps(left, right):
    assert all(torch.equal(mine, other) for mine, other in zip(left[0], right[0], strict=True))
    assert_equal(left[1], right[1])
    assert_equal(left[2], right[2])


class Watched:
    """A device that looks, whenever something moves, at how many bytes of parts are on it."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.worker = None
        self.seen = []  # (phase, bytes of parameters, of gradients, of optimizer states)

    def look(self):
        if self.worker is not None:
            sizes = self.worker.residency.device_bytes()
            sums = [sum(size for name, size in sizes.items() if name.startswith(row)) for row in PART_ROWS]
            self.seen.append((self.worker.residency.phase, *sums))

    def allocate(self, wanted):
        super().allocate(wanted)
        self.look()

    def copy_out(self, copies):
        self.look()
        return super().copy_out(copies)


class WatchedCpu(Watched, CpuDevice):
    """Copies are waited for."""


class WatchedLate(Watched, DeferredDevice):
    """Copies overlap."""


class FailingDevice(CpuDevice):
    """A device whose `countdown`-th copy from now on fails half-way."""

    def __init__(self) -> None:
        self.countdown = 0

    def _counted(self, copies):
        copies = list(copies)
        self.countdown -= 1
        if self.countdown == 0:
            for copy in copies[: len(copies) // 2]:
                copy.device.fill_(0xEE)
                yield copy
            raise OSError("the link is gone")
        yield from copies

    def copy_out(self, copies):
        return super().copy_out(self._counted(copies))

    def copy_in(self, copies):
        return super().copy_in(self._counted(copies))


def save_eight_layers(path: Path) -> tuple[Path, int, int]:
    """A folder, and the bytes of the parameters of its largest part and of all parts."""
    model = save_model_folder(path, 0, qwen3_config(num_layers=8))
    parts = [model.model.embed_tokens, *model.model.layers, model.lm_head]
    sizes = [sum(parameter.nbytes for parameter in part.parameters()) for part in parts]
    return path, max(sizes), sum(sizes)
