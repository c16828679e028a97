"""What tests of several ranks have in common: a worker of one of them, beside plain Hugging Face."""

from __future__ import annotations

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
    hf_lowest,
    make_batch,
    make_settings,
    make_sparse_batch,
    poison_grads,
    shard,
    worker_of,
)
from safetensors.torch import load_file
from token_stat_cases import hf_token_stats, with_predicted_tokens
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.factory import expected_bytes
from nemo_offload_rl.backends.hf.hub_names import HubNames
from nemo_offload_rl.protocols.loss import TokenStat


def make_worker(process, folder, *, keep_reference=False, **changes):
    return worker_of(make_settings(folder, **changes), process, keep_reference=keep_reference)


def equals_hugging_face(process, folder, *, same_names=True, sparse=False, **changes):
    """Loss, gradients, their norm, logprobs and refit tensors of a fresh worker."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = make_sparse_batch() if sparse else make_batch()
    batch = with_predicted_tokens(model, batch)
    expected_stats = hf_token_stats(model, batch)
    expected_loss, expected_grads = hf_loss_and_grads(model, batch)
    with make_worker(process, folder, **changes) as worker:
        early, exact = expected_bytes(worker._settings, process).state, worker._backend.expected_bytes()
        assert not early or all(exact[row] <= early[row] < 1.1 * exact[row] for row in exact)
        mine = shard(batch, worker)
        worker.prepare_for_lp_inference()
        assert_close(worker.get_logprobs(mine), hf_logprobs(model, mine).detach())
        accuracy = worker.evaluate(mine, NLL(TokenStat.ACCURACY)).metrics["token_accuracy"]
        assert accuracy == [pytest.approx(expected_stats[TokenStat.ACCURACY])]
        worker.prepare_for_training()
        loss, metrics = worker.forward_backward(mine, NLL(TokenStat.ENTROPY))
        assert metrics["entropy"] == pytest.approx(expected_stats[TokenStat.ENTROPY], rel=1e-5)
        assert_close(loss, expected_loss)
        assert metrics["seqs"] == 7
        assert_close(metrics["logprob_min"], hf_lowest(model, batch))
        if same_names:
            # A mean over few tokens has gradients above 1, where Hugging Face's own are 2e-6 from those in float64.
            assert_close(full_grads(worker), expected_grads)
        expected_norm = torch.nn.utils.get_total_norm(expected_grads.values())
        assert_close(grad_norm(worker), float(expected_norm))
        worker.zero_grad()
        worker.offload_before_refit()
        assert_equal(divided(worker.named_weights(), model), load_file(Path(folder) / "model.safetensors"))


def divided(weights, model):
    """Weights as the files of the model's family divide them: those of experts have one tensor each."""
    hub = HubNames(model.config.model_type)
    return {own_name: part for name, tensor in weights for own_name, part in hub.divided(name, tensor)}


def goes_on_bit_by_bit(process, folder, **changes):
    """Steps with every phase between them, a reference pass that fails and a resume from disk, against none of it."""
    changes = {"train_micro_batch_size": 2, **changes}  # a rank of two has two micro-batches
    changes |= {"clip_grad": 0.5} if changes.get("backend") == "megatron" else {"max_grad_norm": 0.5}
    batches = [make_batch(seed=seed) for seed in range(3)]
    with make_worker(process, folder, **changes) as worker:
        worker.prepare_for_training()
        results = [worker.train(shard(batch, worker), NLL()) for batch in batches]
        params, optimizer = full_params(worker), full_optimizer(worker)

    tp, ep = changes.get("tensor_parallel_size", 1), changes.get("expert_parallel_size", 1)
    cp = changes.get("context_parallel_size", 1)
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
        assert_equal(exported, divided(full_params(worker).items(), AutoModelForCausalLM.from_pretrained(folder)))
        assert worker.train(shard(batches[2], worker), NLL()) == results[2]
        assert_equal(full_params(worker), params)
        assert_equal(full_optimizer(worker), optimizer)
