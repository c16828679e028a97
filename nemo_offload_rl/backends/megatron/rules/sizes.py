"""What a worker's state takes at least, by the settings and the number of parameters alone."""

from __future__ import annotations

from nemo_offload_rl.backends.megatron.optimizer_spec import optimizer_spec
from nemo_offload_rl.keys.master import PolicyRun
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES


def least_group_bytes(cfg: PolicyRun, num_parameters: int, num_in_experts: int | None = None) -> dict[str, int]:
    """Bytes of one worker's state groups if all parallel ranks share evenly.

    That is the least that the fullest rank has. With adapters the base has neither gradients nor optimizer, and the
    adapters' are small.

    Args:
        cfg: Of the run.
        num_parameters: Of the model.
        num_in_experts: Those of them that are experts'; None if that is not known: all, with expert parallelism.
    """
    megatron = cfg.policy.megatron_cfg
    assert megatron is not None
    optimizer = megatron.optimizer
    stages, tensor = megatron.pipeline_model_parallel_size, megatron.tensor_model_parallel_size
    expert_ranks = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    if num_in_experts is None:
        num_in_experts, expert_ranks = num_parameters, tensor * megatron.expert_model_parallel_size
    num_held = (num_parameters - num_in_experts) // (stages * tensor) + num_in_experts // (stages * expert_ranks)
    num_trained = 0 if megatron.peft.enabled else num_held
    num_updated = num_trained
    if optimizer.use_distributed_optimizer:
        num_updated = min(num_updated, num_parameters // cfg.cluster.world_size if num_trained else 0)
    if optimizer.optimizer_cpu_offload:
        num_updated = int((1 - optimizer.optimizer_offload_fraction) * num_updated)
    dtype = COMPUTE_DTYPES[cfg.policy.precision]
    in_fp32 = megatron.distributed_data_parallel_config.grad_reduce_in_fp32
    return {
        "params": dtype.itemsize * num_held,
        "grads": (4 if in_fp32 else dtype.itemsize) * num_trained,
        "optimizer": optimizer_spec(optimizer).bytes_per_element(dtype) * num_updated,
    }
