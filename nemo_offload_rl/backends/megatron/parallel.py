"""Megatron's process groups and seeds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from nemo_offload_rl.backends.megatron.supported import sizes_problem
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.backend import ModelParallel
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.protocols.backend import ProcessInfo, RankInfo

# Groups with sends between single ranks, which must not queue behind collectives.
_SENDING = ("PIPELINE_MODEL_PARALLEL_GROUP", "CONTEXT_PARALLEL_GROUP")
# Groups that layers wait for; in a shared group they would also wait for gradient reductions.
_IN_LAYERS = (
    "TENSOR_MODEL_PARALLEL_GROUP",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "EXPERT_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_PARALLEL_GROUP",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
)


def join_model_parallel(cfg: MegatronConfig, parallel: ModelParallel, world_size: int) -> bool:
    """Create Megatron's process groups unless they exist; return whether this call created them.

    Megatron keeps them in module globals, so all models in one process share them.

    Raises:
        ConfigError: The sizes do not divide the ranks, or groups of other sizes are in use.
    """
    if (problem := sizes_problem(cfg, world_size)) is not None:
        raise ConfigError(problem)
    if parallel_state.model_parallel_is_initialized():
        if _sizes() != (parallel.tensor, parallel.context, parallel.pipeline, cfg.expert_model_parallel_size):
            raise ConfigError(
                "policy.megatron_cfg has other parallel sizes than the Megatron model in this process; use those sizes"
            )
        return False
    try:
        with _sharing_groups():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor,
                pipeline_model_parallel_size=parallel.pipeline,
                context_parallel_size=parallel.context,
                expert_model_parallel_size=cfg.expert_model_parallel_size,
                expert_tensor_parallel_size=cfg.expert_tensor_parallel_size,
                create_gloo_process_groups=False,
            )
    except BaseException:
        leave_model_parallel()  # some groups exist already
        raise
    return True


@contextmanager
def _sharing_groups() -> Iterator[None]:
    """Let Megatron create one group for the same ranks and use, instead of up to a dozen.

    Each used group, even of a single rank, creates a communicator whose buffers stay on the GPU.
    """
    make, made = parallel_state.create_group, dict[object, Any]()

    def create_group(
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
    ) -> Any:
        key = (tuple(ranks), timeout, backend, use_local_synchronization, _use(ranks, group_desc))
        if key not in made or pg_options is not None:
            made[key] = make(ranks, timeout, backend, pg_options, use_local_synchronization, group_desc)
        return made[key]

    parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = make


def _use(ranks: Sequence[int], group_desc: str | None) -> str | None:
    """Return a group's use: groups with the same ranks and use can be one. All groups of a single rank share one."""
    if len(ranks) == 1:
        return "alone"
    if group_desc in _SENDING:
        return group_desc
    return "in layers" if group_desc in _IN_LAYERS else "outside of layers"


def _sizes() -> tuple[int, int, int, int]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


def leave_model_parallel() -> None:
    """Forget Megatron's process groups."""
    parallel_state.destroy_model_parallel()


def rank_info(process: ProcessInfo) -> RankInfo:
    """Return this process's place among the ranks."""
    return RankInfo(
        process.rank,
        process.world_size,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )


def seed_everything(seed: int) -> None:
    """Seed Megatron's random states, equally on data-parallel ranks and differently on pipeline stages."""
    model_parallel_cuda_manual_seed(
        seed + 100 * parallel_state.get_pipeline_model_parallel_rank(), force_reset_rng=True
    )


def data_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks with different data."""
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group())


def tensor_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks that share each layer."""
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def context_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks that share each sequence."""
    return cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())


def expert_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks that share the experts."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_model_parallel_group())


def pass_groups() -> list[dist.ProcessGroup]:
    """Return the groups of `PolicyBackend.pass_groups`; the sends between pipeline stages connect pair by pair."""
    with_context = cast(dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))
    groups = (tensor_parallel_group(), context_parallel_group(), expert_parallel_group(), with_context)
    return list(dict.fromkeys((*groups, data_parallel_group())))


def pipeline_group() -> dist.ProcessGroup:
    """Return the group of ranks that share the layers."""
    return cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def layout_name() -> str:
    """Name the split of the model over the ranks, without the number of copies."""
    tensor, context, pipeline, expert = _sizes()
    expert_tensor = parallel_state.get_expert_tensor_parallel_world_size()
    return f"tp{tensor}-cp{context}-pp{pipeline}-ep{expert}-etp{expert_tensor}"


def place_in_model(is_expert: bool) -> str:
    """Name this rank's part of the model; ranks with copies of the same part have the same name."""
    stage = pipeline_group().rank()
    if is_expert:
        expert, tensor = (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
        return f"pp{stage}-ep{expert}-etp{tensor}"
    return f"pp{stage}-tp{tensor_parallel_group().rank()}"


def is_first_stage() -> bool:
    """Return whether this rank embeds tokens."""
    return parallel_state.is_pipeline_first_stage()


def is_last_stage() -> bool:
    """Return whether this rank computes logits and losses."""
    return parallel_state.is_pipeline_last_stage()


def from_last_stage[Result](value: Result, device: torch.device) -> Result:
    """Return the last pipeline stage's `value` on every stage.

    `device` is that of the passes. All stages meet there first, where aborting a failed pass ends the wait. The value
    goes through the host.

    Raises:
        RuntimeError: A stage left the pass.
    """
    group = pipeline_group()
    if group.size() == 1:
        return value
    num_stages = torch.ones((), device=device)
    dist.all_reduce(num_stages, group=group)
    if int(num_stages) != group.size():
        raise RuntimeError("a pipeline stage left the pass")
    shared = [value]
    dist.broadcast_object_list(shared, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return shared[0]


def forget_collectives(chunks: Sequence[Any]) -> None:
    """Drop gathers of parameters and reductions of gradients that a pass began; Megatron-core 0.19.2 has no call."""
    for chunk in chunks:
        for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for name in ("param_gather_handle", "grad_reduce_handle"):
                if (handle := getattr(buckets, name)) is not None:
                    with suppress(RuntimeError):  # it may have failed
                        handle.wait()
                    setattr(buckets, name, None)
            if buckets.is_first_batch:
                buckets.per_param_grad_ready_counts = {}  # they would be taken for those of a whole pass
