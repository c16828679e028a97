"""How tokens are spread over experts: auxiliary losses and biases against formulas over Hugging Face's passes."""

from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from policy_cases import (
    NLL,
    Poisoned,
    RaisesAt,
    assert_equal,
    cycle,
    full_grads,
    full_params,
    hf_logprobs,
    make_batch,
    make_settings,
    one_rank_worker,
    run_ranks,
    save_family,
    shard,
    worker_of,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

COEFF, RATE = 0.05, 0.02
TRAINED = {"backend": "megatron", "freeze_moe_router": False, "train_micro_batch_size": 2}


def routed(model, batch):
    """For each layer with experts: [B, S, E] logits of the router in a pass of Hugging Face's, and its module."""
    seen = []
    routers = [m.mlp.gate for m in model.model.layers if hasattr(m.mlp, "gate")]

    def take(router, inputs):
        hidden = inputs[0].unflatten(0, batch.input_ids.shape) if inputs[0].dim() == 2 else inputs[0]
        seen.append(torch.nn.functional.linear(hidden.double(), router.weight.double()))

    hooks = [router.register_forward_pre_hook(take) for router in routers]
    logprobs_BS = hf_logprobs(model, batch)
    for hook in hooks:
        hook.remove()
    return logprobs_BS, list(zip(routers, seen, strict=True))


def is_real(batch):
    return torch.arange(batch.input_ids.shape[1]) < batch.input_lengths[:, None]


def counts_and_scores(logits_TE, top_k):
    """How many of T tokens choose each expert, and the sum of the scores."""
    scores_TE = logits_TE.softmax(-1)
    chosen_TE = torch.zeros_like(scores_TE).scatter(1, scores_TE.topk(top_k, dim=1).indices, 1.0)
    return chosen_TE.sum(0), scores_TE.sum(0)


def expected_grads(model, batches, kind, num_ranks=1):
    """Of the mean NLL over all rows, and of the auxiliary losses of the micro-batches of each rank."""
    model.zero_grad()
    num_tokens = sum(int(batch.input_lengths.sum()) for batch in batches)
    num_counted = sum(batch.loss_mask.sum() for batch in batches)
    num_experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
    so_far = {}
    for index, batch in enumerate(batches):
        logprobs_BS, layers = routed(model, batch)
        loss = -(logprobs_BS * batch.loss_mask).sum() / num_counted
        num_mine = int(batch.input_lengths.sum())
        for number, (_, logits_BSE) in enumerate(layers):
            if kind == "seq_aux_loss":
                rows = [counts_and_scores(*args) for args in rows_of(logits_BSE, batch, top_k)]
                # Megatron-core divides each row by the mean length of the rows.
                mean = num_mine / len(batch)
                aux = sum((f * p).sum() for f, p in rows) * num_experts / (top_k * mean**2) / len(batch)
            else:
                f, p = counts_and_scores(logits_BSE[is_real(batch)], top_k)
                if kind == "global_aux_loss":
                    so_far.setdefault(number, []).append(f.detach())
                    f = torch.stack(so_far[number]).mean(0)
                aux = (f * p).sum() * num_experts / (top_k * num_mine**2)
            loss = loss + COEFF * aux * num_mine / num_tokens
        loss.backward()
        assert index < len(batches)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def rows_of(logits_BSE, batch, top_k):
    return [(logits_BSE[row, : batch.input_lengths[row]], top_k) for row in range(len(batch))]


def by_expert(grads):
    """Gradients by the names of checkpoints, of which only those of routers and attention are compared."""
    return {name: grad for name, grad in grads.items() if ".experts." not in name}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe") / "model"
    return path, save_family(path, "qwen3-moe")


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    path = tmp_path_factory.mktemp("biased") / "model"
    return path, save_family(path, "glm4_moe")


@pytest.mark.trains
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_an_auxiliary_loss_counts_each_token_of_the_step_once_and_no_padding(folder, kind):
    path, model = folder
    batch = make_batch()
    pairs = [batch.select([row, row + 1]) for row in range(0, 8, 2)]
    expected = by_expert(expected_grads(model, pairs, kind))
    plain = by_expert(expected_grads(model, pairs, "seq_aux_loss"))
    assert kind == "seq_aux_loss" or max((expected[name] - plain[name]).abs().max() for name in expected) > 1e-4
    changes = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": COEFF}
    for recompute in (False, True):
        with one_rank_worker(path, **TRAINED, **changes, activation_checkpointing=recompute) as worker:
            worker.prepare_for_training()
            for _ in range(2):  # nothing of a pass is left for the next
                worker.forward_backward(batch, NLL())
                assert_close(by_expert(full_grads(worker)), expected)
                worker.zero_grad()


def tokens_of_experts(model, batch):
    """[layers, E] how many real tokens choose each expert, by sigmoid and bias."""
    _, layers = routed(model, batch)
    found = []
    for router, logits_BSE in layers:
        choices_TE = logits_BSE[is_real(batch)].sigmoid() + router.e_score_correction_bias.double()
        top = choices_TE.topk(model.config.num_experts_per_tok, dim=1).indices
        found.append(torch.zeros_like(choices_TE).scatter(1, top, 1.0).sum(0))
    return torch.stack(found)


def biases_of(tensors):
    return {name: tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}


def moved(biases, counts_LE):
    steps = RATE * torch.sign(counts_LE.mean(1, keepdim=True) - counts_LE).float()
    return {name: bias + step for (name, bias), step in zip(biases.items(), steps, strict=True)}


@pytest.mark.trains
def test_biases_of_experts_move_once_a_step_and_are_state_of_the_model(biased, tmp_path):
    path, model = biased
    batch, saved = make_batch(), tmp_path / "saved"
    before = biases_of(load_file(path / "model.safetensors"))
    expected = moved(before, tokens_of_experts(model, batch))
    with one_rank_worker(path, **TRAINED, moe_router_bias_update_rate=RATE, keep_reference=True) as worker:
        worker.prepare_for_lp_inference()
        worker.get_logprobs(batch)
        worker.prepare_for_training()
        with pytest.raises(ArithmeticError):
            worker.train(batch, RaisesAt(call=2))
        assert worker.train(batch, Poisoned(float("nan"))).is_skipped
        assert_equal(biases_of(full_params(worker)), before)
        worker.train(batch, NLL())
        assert_equal(biases_of(full_params(worker)), expected)
        cycle(worker, batch)
        assert_equal(biases_of(full_params(worker)), expected)
        assert_close(worker.get_reference_logprobs(batch), hf_logprobs(model, batch).detach())
        worker.save_checkpoint(saved)
        worker.export_hf(tmp_path / "hf")
        weights = full_params(worker)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with one_rank_worker(path, **TRAINED, moe_router_bias_update_rate=0.0) as worker:
        worker.load_checkpoint(saved)
        assert_equal(full_params(worker), weights)
        worker.prepare_for_lp_inference()
        assert_close(worker.get_logprobs(batch), hf_logprobs(exported, batch).detach())
        worker.prepare_for_training()
        worker.train(batch, NLL())
        assert_equal(biases_of(full_params(worker)), expected)  # with the rate 0


def check(process, moe, biased):
    """Ranks with rows of their own, and ranks that share each row's layers and split its tokens."""
    for split in ({}, {"tensor_parallel_size": 2, "sequence_parallel": True}):
        balances_as_one(process, moe, biased, expert_model_parallel_size=2, **split)


def balances_as_one(process, moe, biased, **split):
    batch = make_batch()
    model = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32)
    pairs = [batch.select([row, row + 1]) for row in range(0, 8, 2)]
    # A global loss is of the micro-batches that ranks have at a time.
    at_a_time = pairs if "sequence_parallel" in split else [batch.select([0, 1, 4, 5]), batch.select([2, 3, 6, 7])]
    for kind, micro_batches in (("aux_loss", pairs), ("seq_aux_loss", pairs), ("global_aux_loss", at_a_time)):
        changes = {**TRAINED, "moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": COEFF}
        with worker_of(make_settings(moe, **changes, **split), process) as worker:
            worker.prepare_for_lp_inference()
            worker.get_logprobs(shard(batch, worker))
            worker.prepare_for_training()
            worker.forward_backward(shard(batch, worker), NLL())
            assert_close(by_expert(full_grads(worker)), by_expert(expected_grads(model, micro_batches, kind)))
            worker.zero_grad()
    model = AutoModelForCausalLM.from_pretrained(biased, dtype=torch.float32)
    expected = moved(biases_of(load_file(f"{biased}/model.safetensors")), tokens_of_experts(model, batch))
    settings = make_settings(biased, **TRAINED, moe_router_bias_update_rate=RATE, **split)
    with worker_of(replace(settings, train_micro_batch_size=1), process) as worker:
        worker.prepare_for_training()
        worker.train(shard(batch, worker), NLL())
        assert_equal(biases_of(full_params(worker)), expected)


@pytest.mark.processes
def test_ranks_with_different_data_and_experts_balance_as_one(tmp_path, folder, biased):
    run_ranks(2, tmp_path, check, str(folder[0]), str(biased[0]))
