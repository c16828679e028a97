"""Two and four ranks of Megatron on gloo, against plain Hugging Face in each process."""

from pathlib import Path

import pytest
from broken_passes import goes_on_after_one_rank_ran_out_of_memory
from policy_cases import run_ranks
from rank_cases import equals_hugging_face, goes_on_bit_by_bit, make_worker, save_families

from nemo_offload_rl.errors import CheckpointError
from nemo_offload_rl.keys.policy import BatchingConfig

pytestmark = pytest.mark.processes


def check_megatron(process, root):
    megatron = {"backend": "megatron"}
    whole, overlapped = (
        {"use_distributed_optimizer": False},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
    )
    dynamic = BatchingConfig(enabled=True, train_mb_tokens=28, logprob_mb_tokens=28, sequence_length_round=1)
    equals_hugging_face(process, f"{root}/qwen3-tied", **megatron, **whole)
    equals_hugging_face(process, f"{root}/qwen3", **megatron, **overlapped, dynamic_batching=dynamic, sparse=True)
    goes_on_bit_by_bit(process, f"{root}/qwen3-tied", **megatron, **overlapped)
    equals_hugging_face(process, f"{root}/qwen2", **megatron, tensor_parallel_size=2)
    chunked = {"activation_checkpointing": True, "logprob_chunk_size": 3}
    equals_hugging_face(process, f"{root}/qwen3-tied", **megatron, **chunked, tensor_parallel_size=2, sparse=True)
    split = {"tensor_parallel_size": 2, "sequence_parallel": True}
    equals_hugging_face(process, f"{root}/qwen2", **megatron, **split)
    equals_hugging_face(process, f"{root}/qwen3", **megatron, **split, **chunked, sparse=True)
    goes_on_bit_by_bit(process, f"{root}/qwen3-tied", **megatron, **split)
    equals_hugging_face(process, f"{root}/qwen3", **megatron, pipeline_model_parallel_size=2)
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

    check_lack_of_memory(process, root, megatron, overlapped)


def check_lack_of_memory(process, root, megatron, overlapped):
    moments = (0, "forward"), (1, "backward"), (1, "last")
    goes_on_after_one_rank_ran_out_of_memory(
        process, f"{root}/qwen3-tied", moments, num_copies=2, **megatron, **overlapped
    )
    for key, some in (("tensor_parallel_size", moments[1:2]), ("pipeline_model_parallel_size", moments[:2])):
        goes_on_after_one_rank_ran_out_of_memory(process, f"{root}/qwen3", some, num_copies=1, **megatron, **{key: 2})


def check_megatron_by_two_forms(process, root):
    """Four ranks: layers, stages and experts are shared out in two or three ways at once."""
    megatron, experts = {"backend": "megatron"}, {"freeze_moe_router": False, "same_names": False}
    experts |= megatron | {"moe_token_dispatcher_type": "alltoall"}
    split, stages = {"tensor_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
    equals_hugging_face(process, f"{root}/qwen3", **megatron, **stages, tensor_parallel_size=2)
    equals_hugging_face(process, f"{root}/qwen3-tied", **megatron, **stages, **split, sparse=True)
    routed = {"routed": True, "activation_checkpointing": True, "expert_model_parallel_size": 2}
    equals_hugging_face(process, f"{root}/qwen3-moe", **experts, **stages, **split, **routed)
    equals_hugging_face(process, f"{root}/qwen3-moe", **experts, **split, expert_model_parallel_size=4, sparse=True)
    equals_hugging_face(process, f"{root}/qwen3-moe", **experts, **split, expert_tensor_parallel_size=2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    save_families(path, ("qwen3", "qwen3-tied", "qwen2", "qwen3-moe"))
    return path


def test_two_ranks_of_megatron_equal_hugging_face_and_offloading_changes_no_bit(root, tmp_path):
    run_ranks(2, tmp_path, check_megatron, str(root))


def test_four_ranks_of_megatron_by_two_forms_of_parallelism_equal_hugging_face(root, tmp_path):
    run_ranks(4, tmp_path, check_megatron_by_two_forms, str(root))
