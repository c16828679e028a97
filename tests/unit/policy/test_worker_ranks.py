"""Two and four ranks on gloo: data-parallel, tensor-parallel and both, against plain Hugging Face in each process.

Starting processes costs seconds, so each `check_*` runs in one set of them and makes several workers.
"""

import shutil
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from broken_passes import goes_on_after_one_rank_ran_out_of_memory
from cgroups import joined, make_cgroup, remove
from policy_cases import (
    NLL,
    assert_equal,
    full_optimizer,
    full_params,
    make_batch,
    make_settings,
    run_ranks,
    shard,
    torch_optimizer,
)
from rank_cases import equals_hugging_face, goes_on_bit_by_bit, make_worker, save_families
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.dtensor.backend import DTensorBackend
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.policy import BatchingConfig
from nemo_offload_rl.memory.host_plan import GROWTH_BYTES
from nemo_offload_rl.residency import local_tensor

pytestmark = pytest.mark.processes


# With biases where rows and columns are split, and with norms over whole projections and after them.
SPLIT_OTHERWISE = ("llama-bias", "olmo2")


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


def keeps_the_reference_as_it_is_read(process, folder, share=0.5, precision="bfloat16", **changes):
    """At this share of the bytes of the parameters; its logprobs are those of the initial policy."""
    with make_worker(process, folder, keep_reference=True, precision=precision, **changes) as worker:
        batch = shard(make_batch(), worker)
        held = worker.residency.host_bytes()
        worker.prepare_for_lp_inference()
        first = worker.get_logprobs(batch)
        params = worker.residency.device_bytes()["params"]
        assert held["reference"] == pytest.approx(params * share, rel=0.01)
        worker.prepare_for_training()
        worker.train(batch, NLL())
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.prepare_for_lp_inference()
        trained = worker.get_logprobs(batch)
        assert torch.equal(worker.get_reference_logprobs(batch), first)
        assert torch.equal(worker.get_logprobs(batch), trained)
        assert not torch.equal(trained, first)


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
    an_abort_ends_the_collectives_of_its_rank_only(process)
    moments = (0, "forward"), (1, "backward"), (0, "last")
    goes_on_after_one_rank_ran_out_of_memory(process, f"{root}/qwen3-tied", moments, num_copies=2)
    host_memory_is_settled_together(process, f"{root}/qwen3-tied", cgroup, fallback)
    holds_a_shard_and_one_tensor_at_most(process, f"{root}/qwen3-bf16")
    # Ranks whose rows differ in length need the same number of micro-batches.
    dynamic = BatchingConfig(enabled=True, train_mb_tokens=28, logprob_mb_tokens=28, sequence_length_round=1)
    equals_hugging_face(process, f"{root}/llama-tied", dynamic_batching=dynamic, logprob_chunk_size=3)
    # Nothing of the first rank's is counted; it takes part in every collective.
    equals_hugging_face(process, f"{root}/llama-tied", sequence_packing=dynamic, sparse=True)
    equals_hugging_face(process, f"{root}/qwen3-tied", activation_checkpointing=True, sparse=True)
    goes_on_bit_by_bit(process, f"{root}/qwen3-tied")
    small_micro_batches_on_one_rank_are_small_on_all(process, f"{root}/qwen3-tied")


def an_abort_ends_the_collectives_of_its_rank_only(process):
    """As NCCL's abort does, so that only the thread of `Peers` can end those of the other ranks."""
    group = torch.distributed.new_group()
    communicator = group._get_backend(torch.device("cpu"))
    if process.rank == 0:
        communicator.abort()
    torch.distributed.barrier()
    if process.rank == 1:
        sending = torch.distributed.isend(torch.zeros(1), 0, group)
        communicator.abort()
        with pytest.raises(RuntimeError, match="closed"):
            sending.wait()
    torch.distributed.destroy_process_group(group)


def small_micro_batches_on_one_rank_are_small_on_all(process, folder):
    """A rank expects that its pass does not fit. All ranks cut theirs, the others into more, and get equally many."""
    batch = make_batch()
    batch = replace(batch, input_lengths=torch.tensor([14] * 4 + [12] * 4))

    def results(size, too_large=sys.maxsize):
        with make_worker(process, folder, train_micro_batch_size=size, logprob_batch_size=size) as worker:
            worker.residency.too_large_size = lambda _kind, _size: too_large if process.rank else sys.maxsize
            worker.prepare_for_training()
            mine = shard(batch, worker)
            return worker.get_logprobs(mine), worker.train(mine, NLL()), full_params(worker)

    expected, found = results(size=1), results(size=4, too_large=25)
    assert torch.equal(found[0], expected[0])
    assert found[1] == replace(expected[1], oom_splits=2 if process.rank else 6)
    assert_equal(found[2], expected[2])


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
    # First, since a failed pass has all groups of the process connected again, also those of workers that have ended.
    moments, split = ((1, "backward"),), {"tensor_parallel_size": 2}
    goes_on_after_one_rank_ran_out_of_memory(process, f"{root}/qwen3-tied", moments, num_copies=1, **split)
    equals_hugging_face(process, f"{root}/llama-bias", tensor_parallel_size=2)
    again = {"activation_checkpointing": True, "logprob_chunk_size": 3}
    equals_hugging_face(process, f"{root}/qwen3-tied", tensor_parallel_size=2, **again, sparse=True)
    check_sequence_parallel(process, root)
    in_16_bits = {"optimizer": torch_optimizer("nemo_offload_rl.optim.AdamW", lr=1e-3)}
    goes_on_bit_by_bit(process, f"{root}/qwen3", tensor_parallel_size=2, **in_16_bits)
    saved = Path(root) / "saved-2"
    loads_under_other_layouts(process, f"{root}/qwen3", saved, "tensor_parallel_size", (1, 2), **in_16_bits)


def check_sequence_parallel(process, root):
    """Rows of odd widths among them, which are filled up."""
    split = {"tensor_parallel_size": 2, "sequence_parallel": True}
    packing = BatchingConfig(enabled=True, train_mb_tokens=28, logprob_mb_tokens=33, sequence_length_round=1)
    for family in (*SPLIT_OTHERWISE, "granite-tied"):
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
    equals_hugging_face(process, f"{root}/granite-tied", **shared)  # factors of attention
    equals_hugging_face(process, f"{root}/qwen3-moe", **shared, routed=True)
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
    equals_hugging_face(process, f"{root}/qwen3-tied", **shared, logprob_chunk_size=3, sequence_parallel=True)


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
        equals_hugging_face(process, f"{root}/qwen3-moe", expert_parallel_size=size, routed=size == 4)
    dynamic = BatchingConfig(enabled=True, train_mb_tokens=28, logprob_mb_tokens=28, sequence_length_round=1)
    packed = {"sequence_packing": dynamic, "activation_checkpointing": True, "sparse": True}
    equals_hugging_face(process, f"{root}/qwen3-moe", expert_parallel_size=2, **packed)
    goes_on_bit_by_bit(process, f"{root}/qwen3-moe", expert_parallel_size=2, **fused)
    keeps_the_reference_as_it_is_read(process, f"{root}/qwen3-moe", expert_parallel_size=2)
    saved, sizes = Path(root) / "saved-1-1-experts-2", (2, 1, 4)
    loads_under_other_layouts(process, f"{root}/qwen3-moe", saved, "expert_parallel_size", sizes, **fused)


def check_references(process, root):
    """Parameters that passes read as they are, and two ranks of either backend."""
    for changes in ({}, {"tensor_parallel_size": 2}):
        keeps_the_reference_as_it_is_read(process, f"{root}/qwen3-tied", 1.0, "float32", **changes)
        for precision in ("float32", "bfloat16"):
            keeps_the_reference_as_it_is_read(
                process, f"{root}/qwen3-tied", 1.0, precision, backend="megatron", **changes
            )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    save_families(path, ("qwen3", "qwen3-tied", "llama-tied", "qwen3-moe", "granite-tied", *SPLIT_OTHERWISE))
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


def test_each_of_two_ranks_keeps_its_part_of_the_reference(root, tmp_path):
    run_ranks(2, tmp_path, check_references, str(root))
