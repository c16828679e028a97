"""What tests of several ranks have in common: a worker of one of them, beside plain Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from closeness import assert_close
from policy_cases import (
    NLL,
    RaisesAt,
    assert_equal,
    forward_hook_on_layer,
    full_grads,
    full_optimizer,
    full_params,
    grad_norm,
    hf_logprobs,
    hf_loss_and_grads,
    make_batch,
    make_settings,
    make_sparse_batch,
    poison_grads,
    save_family,
    shard,
    worker_of,
)
from routing_cases import forced, with_random_routing
from safetensors.torch import load_file
from token_stat_cases import hf_token_stats, with_predicted_tokens
from torch import Tensor

from nemo_offload_rl.backends.factory import expected_bytes
from nemo_offload_rl.backends.hf.model_folder import local_config
from nemo_offload_rl.backends.hf.weight_files import HubNames
from nemo_offload_rl.data.batch import TrainBatch
from nemo_offload_rl.keys.policy import RouterReplayConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.memory.account import model_sizes
from nemo_offload_rl.memory.groups import ModelElements, group_bytes, held_by_stage
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.protocols.loss import TokenStat
from nemo_offload_rl.residency import OPTIMIZER


@dataclass(frozen=True)
class Reference:
    """What Hugging Face's model makes of a batch.

    Attributes:
        batch: About half of its tokens are those that the model would choose.
        logprobs_BS: Of all of its tokens.
        loss: Mean NLL.
        grads: Of that.
        stats: Means over the counted tokens.
    """

    batch: TrainBatch
    logprobs_BS: Tensor
    loss: float
    grads: dict[str, Tensor]
    stats: dict[TokenStat, float]


def save_families(root: Path, families: Sequence[str]) -> None:
    """Write a folder for each family, and next to it references that all ranks of all layouts read."""
    for family in families:
        model = save_family(root / family, family)
        for kind in ("dense", "sparse", *(("routed",) if family == "qwen3-moe" else ())):
            batch, forcing = (
                with_predicted_tokens(model, make_sparse_batch() if kind == "sparse" else make_batch()),
                nullcontext,
            )
            if kind == "routed":
                batch = with_random_routing(batch, model.config)
                forcing = partial(forced, batch, (0, 1), model.config.num_experts)
            with forcing():
                loss, grads = hf_loss_and_grads(model, batch)
                logprobs_BS = hf_logprobs(model, batch).detach()
            with forcing():
                stats = hf_token_stats(model, batch)
            torch.save(Reference(batch, logprobs_BS, loss, grads, stats), _reference_path(root / family, kind))


def _reference_path(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}.pt")


def make_worker(process, folder, *, keep_reference=False, **changes):
    return worker_of(make_settings(folder, **changes), process, keep_reference=keep_reference)


def equals_hugging_face(process, folder, *, same_names=True, sparse=False, routed=False, **changes):
    """Loss, gradients, their norm, logprobs, refit tensors and planned bytes of state of a fresh worker.

    With `routed`, tokens go to random experts.
    """
    kind = "routed" if routed else "sparse" if sparse else "dense"
    expected: Reference = torch.load(_reference_path(Path(folder), kind), weights_only=False)
    changes |= {"router_replay": RouterReplayConfig(enabled=True)} if routed else {}
    batch = expected.batch
    with make_worker(process, folder, **changes) as worker:
        early, exact = expected_bytes(worker._settings, process).state, worker._backend.expected_bytes()
        assert not early or all(exact[row] <= early[row] < 1.1 * exact[row] for row in exact)
        mine = shard(batch, worker)
        worker.prepare_for_lp_inference()
        first_row = worker._backend.rank_info.dp_rank * len(mine)
        assert_close(worker.get_logprobs(mine), expected.logprobs_BS[first_row : first_row + len(mine)])
        accuracy = worker.evaluate(mine, NLL(TokenStat.ACCURACY)).metrics["token_accuracy"]
        assert accuracy == [pytest.approx(expected.stats[TokenStat.ACCURACY])]
        worker.prepare_for_training()
        loss, metrics = worker.forward_backward(mine, NLL(TokenStat.ENTROPY))
        assert metrics["entropy"] == pytest.approx(expected.stats[TokenStat.ENTROPY], rel=1e-5)
        assert_close(loss, expected.loss)
        assert metrics["seqs"] == 7
        assert_close(metrics["logprob_min"], float(expected.logprobs_BS[batch.loss_mask > 0].min()))
        if same_names:
            # A mean over few tokens has gradients above 1, where Hugging Face's own are 2e-6 from those in float64.
            assert_close(full_grads(worker), expected.grads)
        assert_close(grad_norm(worker), float(torch.nn.utils.get_total_norm(expected.grads.values())))
        held = worker.residency.device_bytes()
        worker.zero_grad()
        worker.offload_before_refit()
        assert_equal(divided(worker.named_weights(), folder), load_file(Path(folder) / "model.safetensors"))
        worker.prepare_for_training()
        worker.train(mine, NLL())
        held |= {OPTIMIZER: worker.residency.device_bytes()[OPTIMIZER]}
        planned = planned_groups(worker._settings, process)
        # A model of this size has many norms and biases, which tensor-parallel ranks hold whole, and much padding.
        assert all(0.96 * held[name] < planned[name] <= held[name] for name in held), (planned, held)


def planned_groups(settings: PolicySettings, process: ProcessInfo) -> dict[str, int]:
    """Bytes of one rank's state groups as a plan counts them before the start."""
    sizes, config = model_sizes(settings.model_name), local_config(settings.model_name, {})
    stages = held_by_stage(
        settings, process.world_size, ModelElements.of(sizes.num_parameters, sizes, config, settings)
    )
    held = stages[process.rank * len(stages) // process.world_size]
    return group_bytes(settings, held, config, on_gpu=process.device == "cuda")


def divided(weights: Iterable[tuple[str, Tensor]], folder: Path | str) -> dict[str, Tensor]:
    """Weights as the files of the folder's family divide them: those of experts have one tensor each."""
    hub = HubNames(json.loads((Path(folder) / "config.json").read_text())["model_type"])
    return {own_name: part for name, tensor in weights for own_name, part in hub.divided(name, tensor)}


def goes_on_bit_by_bit(process, folder, **changes):
    """Steps with every phase between them, a reference pass that fails and a resume from disk, against none of it."""
    tp, ep = changes.get("tensor_parallel_size", 1), changes.get("expert_parallel_size", 1)
    cp = changes.get("context_parallel_size", 1)
    # Two micro-batches of each rank's rows.
    changes = {"train_micro_batch_size": max(1, 4 * tp * cp // process.world_size), **changes}
    changes |= {"clip_grad": 0.5} if changes.get("backend") == "megatron" else {"max_grad_norm": 0.5}
    batches = [make_batch(seed=seed) for seed in range(3)]
    with make_worker(process, folder, **changes) as worker:
        worker.prepare_for_training()
        results = [worker.train(shard(batch, worker), NLL()) for batch in batches]
        params, optimizer = full_params(worker), full_optimizer(worker)

    saved = Path(folder).parent / (f"saved-{tp}" if ep == cp == 1 else f"saved-{tp}-{cp}-experts-{ep}")
    with make_worker(
        process,
        folder,
        keep_reference=True,
        use_pinned_optimizer_offload=False,
        offload_optimizer_states_for_logprob=True,
        **changes,
    ) as worker:
        worker.prepare_for_lp_inference()
        first = worker.get_logprobs(shard(batches[0], worker))
        worker.prepare_for_training()
        with pytest.raises(ArithmeticError):
            worker.train(shard(batches[0], worker), RaisesAt(call=2))
        assert worker.train(shard(batches[0], worker), NLL()) == results[0]
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.prepare_for_lp_inference()
        assert torch.equal(worker.get_reference_logprobs(shard(batches[0], worker)), first)
        hook = forward_hook_on_layer(worker, 1, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.get_reference_logprobs(shard(batches[0], worker))
        hook.remove()
        worker.prepare_for_training()
        worker.forward_backward(shard(batches[2], worker), NLL())
        if process.rank == process.world_size - 1:
            poison_grads(worker)  # after they were reduced: the other ranks see none of it
        assert worker.optim_step().is_skipped
        assert worker.train(shard(batches[1], worker), NLL()) == results[1]
        worker.offload_after_refit()
        worker.save_checkpoint(saved)
        worker.export_hf(saved.with_suffix(".hf"))

    with make_worker(process, folder, **changes) as worker:
        worker.load_checkpoint(saved)
        worker.prepare_for_training()
        exported = load_file(saved.with_suffix(".hf") / "model.safetensors")
        assert_equal(exported, divided(full_params(worker).items(), folder))
        assert worker.train(shard(batches[2], worker), NLL()) == results[2]
        assert_equal(full_params(worker), params)
        assert_equal(full_optimizer(worker), optimizer)
