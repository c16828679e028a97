"""Two and four ranks on gloo: data-parallel, tensor-parallel and both, against plain Hugging Face in each process.

Starting processes costs seconds, so each `check_*` runs in one set of them and makes several workers.
"""

import shutil
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from cgroups import joined, make_cgroup, remove
from closeness import assert_close
from open_files import open_files
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
    run_ranks,
    save_family,
    shard,
    torch_optimizer,
    worker_of,
)
from safetensors.torch import load_file
from token_stat_cases import hf_token_stats, with_predicted_tokens
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from nemo_offload_rl.errors import CheckpointError, ConfigError
from nemo_offload_rl.policy.backends.dtensor.backend import DTensorBackend
from nemo_offload_rl.policy.backends.factory import expected_bytes
from nemo_offload_rl.policy.backends.hub_names import HubNames
from nemo_offload_rl.policy.config import BatchingConfig
from nemo_offload_rl.policy.host_plan import GROWTH_BYTES
from nemo_offload_rl.policy.interfaces import TokenStat
from nemo_offload_rl.residency import local_tensor

pytestmark = pytest.mark.processes


# With biases where columns are split, with whole projections between norms, and with factors at every place.
SPLIT_OTHERWISE = ("llama-bias", "olmo2", "granite-tied")


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


def holds_a_shard_and_one_tensor_at_most(process, folder, **changes):
    """Host memory that torch takes while a model is built and read."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        backend = DTensorBackend(make_settings(folder, **changes), process)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    # A mapped file is told as its size; its pages are the system's.
    mapped_bytes = (Path(folder) / "model.safetensors").stat().st_size
    taken = [event for event in events if abs(event.nbytes()) != mapped_bytes]
    peak_bytes = max(accumulate(event.nbytes() for event in sorted(taken, key=lambda event: event.start_ns())))
    parameters = [parameter for _, parameter in backend._parameters]
    shard_bytes = sum(local_tensor(parameter).nbytes for parameter in parameters)
    sizes = [4 * parameter.numel() for parameter in parameters]
    rest_bytes = 2**15  # rotary frequencies, messages between ranks
    assert shard_bytes < peak_bytes < shard_bytes + max(sizes) + rest_bytes < 0.8 * sum(sizes)
    backend.close()


def goes_on_bit_by_bit(process, folder, **changes):
    """Steps with every phase between them, a reference pass that fails and a resume from disk, against none of it."""
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


def keeps_the_reference_as_it_is_read(process, folder, **changes):
    """In bfloat16 at half the bytes of the parameters; its logprobs are those of the initial policy."""
    with make_worker(process, folder, keep_reference=True, precision="bfloat16", **changes) as worker:
        batch = shard(make_batch(), worker)
        held = worker.residency.host_bytes()
        worker.prepare_for_lp_inference()
        first = worker.get_logprobs(batch)
        params = worker.residency.device_bytes()["params"]
        assert held["reference"] == pytest.approx(params / 2, rel=0.01)
        worker.prepare_for_training()
        worker.train(batch, NLL())
        worker.prepare_for_lp_inference()
        trained = worker.get_logprobs(batch)
        assert torch.equal(worker.get_reference_logprobs(batch), first)
        assert torch.equal(worker.get_logprobs(batch), trained)
        assert not torch.equal(trained, first)


def has_the_reference_on_disk(process, folder, disk, **changes):
    """Each rank has a part of it in a file of its own, and the logprobs are those of one in host memory."""
    seen = []
    for reference_dir in (None, str(disk)):
        with make_worker(process, folder, keep_reference=True, reference_dir=reference_dir, **changes) as worker:
            batch = shard(make_batch(), worker)
            worker.prepare_for_training()
            worker.train(batch, NLL())
            worker.offload_before_refit()
            worker.offload_after_refit()
            worker.prepare_for_lp_inference()
            own = worker.get_logprobs(batch)
            seen.append(worker.get_reference_logprobs(batch))
            assert torch.equal(worker.get_logprobs(batch), own)
            assert not torch.equal(seen[-1], own)
            assert len(open_files(disk)) == (reference_dir is not None)
    assert torch.equal(*seen)
    assert open_files(disk) == [] and not list(disk.iterdir())


def loads_under_other_layouts(process, folder, saved, key, sizes, **changes):
    """What ranks of one layout wrote, read by those of others."""
    states = []
    for size in sizes:
        with make_worker(process, folder, **{key: size}, **changes) as worker:
            worker.load_checkpoint(saved)
            states.append((full_params(worker), full_optimizer(worker)))
    for params, optimizer in states[1:]:
        assert_equal(params, states[0][0])
        assert_equal(optimizer, states[0][1])


def check_data_parallel(process, root, cgroup, fallback):
    host_memory_is_settled_together(process, f"{root}/qwen3-tied", cgroup, fallback)
    holds_a_shard_and_one_tensor_at_most(process, f"{root}/qwen3-bf16")
    equals_hugging_face(process, f"{root}/qwen3-tied", activation_checkpointing=True)
    # Ranks whose rows differ in length need the same number of micro-batches.
    dynamic = BatchingConfig(enabled=True, train_mb_tokens=28, logprob_mb_tokens=28, sequence_length_round=1)
    equals_hugging_face(process, f"{root}/llama-tied", dynamic_batching=dynamic, logprob_chunk_size=3)
    equals_hugging_face(process, f"{root}/llama-tied", sequence_packing=dynamic)
    # Nothing of the first rank's is counted; it takes part in every collective.
    equals_hugging_face(process, f"{root}/llama-tied", sequence_packing=dynamic, sparse=True)
    equals_hugging_face(process, f"{root}/qwen3", sparse=True)
    goes_on_bit_by_bit(process, f"{root}/qwen3-tied")


def host_memory_is_settled_together(process, folder, cgroup, fallback):
    """A limit that holds one of the two workers is told to both, in one line; one that holds both is enough."""
    with joined(cgroup, fallback):
        one_bytes = GROWTH_BYTES + (16 << 20)  # the model is tiny
        refused = rf"{cgroup.maximum} leaves 0\.\d\d GiB for 2 workers that need 1\.0\d; no setting makes it fit"
        for limit_bytes, words in ((one_bytes // 2, refused), (3 * one_bytes // 2, refused), (3 * one_bytes, None)):
            torch.distributed.barrier()
            if process.rank == 0:
                cgroup.limit(limit_bytes)
            torch.distributed.barrier()
            if words is None:
                with make_worker(process, folder) as worker:
                    assert "host memory: policy" in worker.residency_plan()
                continue
            with pytest.raises(ConfigError, match=words) as caught:
                make_worker(process, folder).__enter__()
            assert "\n" not in str(caught.value)
        torch.distributed.barrier()


def check_tensor_parallel(process, root):
    for family in ("qwen3", "qwen3-tied", "qwen2", *SPLIT_OTHERWISE, "llama-tied"):
        equals_hugging_face(process, f"{root}/{family}", tensor_parallel_size=2)
    equals_hugging_face(
        process, f"{root}/qwen3-tied", tensor_parallel_size=2, activation_checkpointing=True, logprob_chunk_size=3
    )
    equals_hugging_face(process, f"{root}/qwen3-tied", tensor_parallel_size=2, sparse=True)
    check_sequence_parallel(process, root)
    in_16_bits = {"optimizer": torch_optimizer("nemo_offload_rl.optim.AdamW", lr=1e-3)}
    goes_on_bit_by_bit(process, f"{root}/qwen3", tensor_parallel_size=2, **in_16_bits)
    saved = Path(root) / "saved-2"
    loads_under_other_layouts(process, f"{root}/qwen3", saved, "tensor_parallel_size", (1, 2), **in_16_bits)


def check_sequence_parallel(process, root):
    """Rows of odd widths among them, which are filled up."""
    split = {"tensor_parallel_size": 2, "sequence_parallel": True}
    packing = BatchingConfig(enabled=True, train_mb_tokens=28, logprob_mb_tokens=33, sequence_length_round=1)
    for family in ("qwen3", *SPLIT_OTHERWISE, "llama-tied"):
        equals_hugging_face(process, f"{root}/{family}", **split)
    again = {"activation_checkpointing": True, "logprob_chunk_size": 3}
    equals_hugging_face(process, f"{root}/qwen3-tied", **split, **again, sequence_packing=packing, sparse=True)
    with make_worker(process, f"{root}/qwen3", **split) as worker:
        seen = []
        norm = worker._backend._built.layers[1].post_attention_layernorm
        norm.register_forward_hook(lambda _norm, _inputs, output: seen.append(output.shape[1]))
        worker.prepare_for_lp_inference()
        worker.get_logprobs(replace(make_batch(num_rows=2, width=9), input_lengths=torch.tensor([9, 4])))
        assert seen == [5]


def check_context_parallel(process, root):
    shared = {"context_parallel_size": 2}
    dynamic = BatchingConfig(enabled=True, train_mb_tokens=28, logprob_mb_tokens=28, sequence_length_round=1)
    for family in ("qwen3", *SPLIT_OTHERWISE, "qwen3-moe"):
        equals_hugging_face(process, f"{root}/{family}", **shared)
    again = {"activation_checkpointing": True, "logprob_chunk_size": 3}
    equals_hugging_face(process, f"{root}/qwen3-tied", **shared, **again, dynamic_batching=dynamic, sparse=True)
    goes_on_bit_by_bit(process, f"{root}/qwen3-tied", **shared)
    loads_under_other_layouts(
        process, f"{root}/qwen3-tied", Path(root) / "saved-1-2-experts-1", "context_parallel_size", (1, 2)
    )


def check_four_that_share_rows(process, root):
    """All four of them; two and two, with rows of their own; and two and two that share layers."""
    equals_hugging_face(process, f"{root}/qwen3", context_parallel_size=4)
    equals_hugging_face(process, f"{root}/llama-tied", context_parallel_size=2, sparse=True)
    shared = {"context_parallel_size": 2, "tensor_parallel_size": 2}
    equals_hugging_face(process, f"{root}/qwen3-tied", **shared, logprob_chunk_size=3)
    goes_on_bit_by_bit(process, f"{root}/qwen3", **shared, sequence_parallel=True)


def check_both(process, root):
    holds_a_shard_and_one_tensor_at_most(process, f"{root}/qwen3-bf16", tensor_parallel_size=2)
    equals_hugging_face(process, f"{root}/qwen3-tied", tensor_parallel_size=2)
    fused = torch_optimizer("AdamW", lr=1e-3, fused=True, decay_norm_and_bias=False)
    split = {"tensor_parallel_size": 2, "sequence_parallel": True}
    goes_on_bit_by_bit(process, f"{root}/qwen3-tied", **split, optimizer=fused)
    keeps_the_reference_as_it_is_read(process, f"{root}/qwen3-tied", tensor_parallel_size=2)


def check_experts(process, root):
    """Four ranks with different tokens; of a layer's four experts each has one, or two of them share two."""
    fused = {"optimizer": torch_optimizer("AdamW", lr=1e-3, fused=True, decay_norm_and_bias=False)}
    for size in (1, 4):
        equals_hugging_face(process, f"{root}/qwen3-moe", expert_parallel_size=size)
    dynamic = BatchingConfig(enabled=True, train_mb_tokens=28, logprob_mb_tokens=28, sequence_length_round=1)
    packed = {"sequence_packing": dynamic, "activation_checkpointing": True, "sparse": True}
    equals_hugging_face(process, f"{root}/qwen3-moe", expert_parallel_size=2, **packed)
    goes_on_bit_by_bit(process, f"{root}/qwen3-moe", expert_parallel_size=2, train_micro_batch_size=1, **fused)
    keeps_the_reference_as_it_is_read(process, f"{root}/qwen3-moe", expert_parallel_size=2)
    saved, sizes = Path(root) / "saved-1-1-experts-2", (2, 1, 4)
    loads_under_other_layouts(process, f"{root}/qwen3-moe", saved, "expert_parallel_size", sizes, **fused)


def check_megatron(process, root):
    megatron = {"backend": "megatron"}
    whole, overlapped = (
        {"use_distributed_optimizer": False},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
    )
    dynamic = BatchingConfig(enabled=True, train_mb_tokens=28, logprob_mb_tokens=28, sequence_length_round=1)
    equals_hugging_face(process, f"{root}/qwen3-tied", **megatron, **whole)
    equals_hugging_face(process, f"{root}/qwen3", **megatron, **overlapped, dynamic_batching=dynamic)
    equals_hugging_face(process, f"{root}/qwen3", **megatron, **overlapped, sparse=True)
    goes_on_bit_by_bit(process, f"{root}/qwen3-tied", **megatron, **overlapped)
    for family in ("qwen3", "qwen3-tied", "qwen2", "llama-tied"):
        equals_hugging_face(process, f"{root}/{family}", **megatron, tensor_parallel_size=2)
    chunked = {"activation_checkpointing": True, "logprob_chunk_size": 3}
    equals_hugging_face(process, f"{root}/qwen3-tied", **megatron, **chunked, tensor_parallel_size=2, sparse=True)
    goes_on_bit_by_bit(process, f"{root}/qwen3", **megatron, tensor_parallel_size=2)
    split = {"tensor_parallel_size": 2, "sequence_parallel": True}
    for family in ("qwen3-tied", "qwen2"):
        equals_hugging_face(process, f"{root}/{family}", **megatron, **split)
    equals_hugging_face(process, f"{root}/qwen3", **megatron, **split, **chunked, sparse=True)
    goes_on_bit_by_bit(process, f"{root}/qwen3-tied", **megatron, **split)
    for family in ("qwen3", "qwen3-tied"):
        equals_hugging_face(process, f"{root}/{family}", **megatron, pipeline_model_parallel_size=2)
    equals_hugging_face(process, f"{root}/qwen3-tied", **megatron, pipeline_model_parallel_size=2, sparse=True)
    # Weights of the experts have other names in a folder than in transformers' module.
    experts = {"moe_token_dispatcher_type": "allgather", "freeze_moe_router": False, "same_names": False}
    equals_hugging_face(process, f"{root}/qwen3-moe", **megatron, **experts)
    # Each rank has two of the four experts, and exports all of them.
    experts["moe_token_dispatcher_type"] = "alltoall"
    for size in ("expert_model_parallel_size", "pipeline_model_parallel_size"):
        equals_hugging_face(process, f"{root}/qwen3-moe", **megatron, **experts, **{size: 2})
    # The same two ranks share every layer too; and then, each expert.
    for size in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        equals_hugging_face(process, f"{root}/qwen3-moe", **megatron, **experts, **split, **{size: 2})
    with make_worker(process, f"{root}/qwen3", **megatron) as worker, pytest.raises(CheckpointError, match="tp2"):
        worker.load_checkpoint(Path(root) / "saved-2")


def check_reference_on_disk(process, root, disk):
    for changes in ({}, {"tensor_parallel_size": 2}, {"precision": "bfloat16"}):
        has_the_reference_on_disk(process, f"{root}/qwen3-tied", disk, **changes)
        has_the_reference_on_disk(process, f"{root}/qwen3-tied", disk, backend="megatron", **changes)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3-tied", "qwen2", "llama-tied", "qwen3-moe", *SPLIT_OTHERWISE):
        save_family(path / family, family)
    shutil.copytree(path / "qwen3", path / "qwen3-bf16")
    AutoModelForCausalLM.from_pretrained(path / "qwen3", dtype=torch.bfloat16).save_pretrained(path / "qwen3-bf16")
    return path


def test_two_data_parallel_ranks_equal_hugging_face_and_offloading_changes_no_bit(root, tmp_path):
    fallback = tmp_path / "no_cgroup"
    cgroup = make_cgroup(fallback)
    try:
        run_ranks(2, tmp_path, check_data_parallel, str(root), cgroup, fallback)
    finally:
        remove(cgroup)


def test_two_tensor_parallel_ranks_equal_hugging_face_and_offloading_changes_no_bit(root, tmp_path):
    run_ranks(2, tmp_path, check_tensor_parallel, str(root))


def test_two_ranks_that_share_rows_equal_hugging_face_and_offloading_changes_no_bit(root, tmp_path):
    run_ranks(2, tmp_path, check_context_parallel, str(root))


def test_ranks_that_share_rows_beside_others_equal_hugging_face(root, tmp_path):
    run_ranks(4, tmp_path, check_four_that_share_rows, str(root))


def test_data_and_tensor_parallel_ranks_together_equal_hugging_face(root, tmp_path):
    run_ranks(4, tmp_path, check_both, str(root))


def test_ranks_with_different_experts_equal_hugging_face_and_offloading_changes_no_bit(root, tmp_path):
    run_ranks(4, tmp_path, check_experts, str(root))


def test_two_ranks_of_megatron_equal_hugging_face_and_offloading_changes_no_bit(root, tmp_path):
    run_ranks(2, tmp_path, check_megatron, str(root))


def test_ranks_with_their_references_on_disk_have_the_logprobs_of_those_in_host_memory(root, tmp_path):
    (disk := tmp_path / "disk").mkdir()
    run_ranks(2, tmp_path, check_reference_on_disk, str(root), disk)
