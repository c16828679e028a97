"""The YAML keys `policy.*`; those of a training backend are beside it, in `policy/backends/*/config.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from nemo_offload_rl.data.config import TokenizerConfig
from nemo_offload_rl.generation.config import GenerationConfig
from nemo_offload_rl.policy.backends.config import BackendConfig
from nemo_offload_rl.policy.backends.dtensor.config import DTensorConfig
from nemo_offload_rl.policy.backends.megatron.config import MegatronConfig
from nemo_offload_rl.schema import doc, section


@section
class OptimizerConfig:
    """`policy.optimizer`: the optimizer of the DTensor backend."""

    name: Annotated[
        str,
        doc(
            "Dotted path of a torch optimizer class, as `torch.optim.AdamW`; `nemo_offload_rl.optim.AdamW` keeps "
            "moments of 16 bits."
        ),
    ]
    kwargs: Annotated[dict[str, Any], doc("Its arguments: `lr`, `weight_decay`, `betas`, `eps`, ...")]
    decay_norm_and_bias: Annotated[
        bool,
        doc(
            "Apply `weight_decay` to norms and biases too, as torch does when it is given all parameters. false leaves "
            "them out, as Megatron does."
        ),
    ]


@section
class SchedulerPhaseConfig:
    """An entry of `policy.scheduler`: one phase of the learning-rate schedule."""

    name: Annotated[str, doc("Dotted path of a torch scheduler class, as `torch.optim.lr_scheduler.LinearLR`.")]
    kwargs: Annotated[dict[str, Any], doc("Its arguments.")]


@section
class SchedulerMilestonesConfig:
    """The last entry of `policy.scheduler` when there are several phases."""

    milestones: Annotated[
        tuple[int, ...], doc("Steps of the run at which the second, third, ... phase begin; ascending.")
    ]


def _scheduler_tag(entry: Any) -> str:
    return "milestones" if isinstance(entry, dict) and "milestones" in entry else "phase"


SchedulerEntry = Annotated[
    Annotated[SchedulerPhaseConfig, Tag("phase")] | Annotated[SchedulerMilestonesConfig, Tag("milestones")],
    Discriminator(_scheduler_tag),
]


@section
class BatchingConfig:
    """`policy.dynamic_batching` and `policy.sequence_packing`: micro-batches by tokens instead of by samples."""

    enabled: Annotated[bool, doc("Use it; dynamic batching and sequence packing exclude each other.")]
    train_mb_tokens: Annotated[int, doc("Tokens of one training micro-batch, padding included, at most.", ge=1)]
    logprob_mb_tokens: Annotated[int, doc("The same of one micro-batch for logprobs.", ge=1)]
    sequence_length_round: Annotated[int, doc("Lengths are rounded up to a multiple of this many tokens.", ge=1)]


@section
class TrainedPolicyConfig:
    """`policy`: the model, how it is trained and where its state lives. All that SFT and DPO have."""

    model_name: Annotated[str, doc("Folder or hub name of a Hugging Face causal language model.", min_length=1)]
    tokenizer: Annotated[TokenizerConfig, doc("The tokenizer.")]
    hf_config_overrides: Annotated[dict[str, Any], doc("Values to set in the model's Hugging Face configuration.")]
    train_global_batch_size: Annotated[
        int, doc("Sequences for each optimizer step, over all workers: responses, or pairs in DPO.", ge=1)
    ]
    train_micro_batch_size: Annotated[int, doc("Sequences in one forward and backward pass of one worker.", ge=1)]
    logprob_batch_size: Annotated[int, doc("Sequences in one forward pass for logprobs of one worker.", ge=1)]
    logprob_chunk_size: Annotated[
        int | None, doc("Positions whose logits are turned into logprobs at once, to save memory; null for all.", ge=1)
    ]
    max_total_sequence_length: Annotated[int, doc("Longest prompt plus response, in tokens.", ge=2)]
    make_sequence_length_divisible_by: Annotated[
        int, doc("Batches are padded to a multiple of this many tokens.", ge=1)
    ]
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], doc("Compute type; parameters and optimizer are float32.")
    ]
    deterministic: Annotated[
        bool,
        doc(
            "Use operations whose results repeat bit by bit. Of others a warning tells with Megatron; with DTensor "
            "they end the run. Slower; for comparing runs."
        ),
    ]
    max_grad_norm: Annotated[float | None, doc("Gradients are scaled down to this norm; null for no limit.", gt=0)]
    max_skipped_updates: Annotated[
        int,
        doc(
            "An update whose gradient norm is not finite is skipped by all workers and leaves parameters, optimizer "
            "and schedule as they were; more than this many in a row end the run.",
            ge=0,
        ),
    ]
    optimizer: Annotated[OptimizerConfig | None, doc("Optimizer of the DTensor backend; null with Megatron.")]
    scheduler: Annotated[
        tuple[SchedulerEntry, ...] | None,
        doc("Learning-rate phases, then their milestones; null keeps the rate constant."),
    ]
    dynamic_batching: Annotated[BatchingConfig, doc("Group sequences of like length into one micro-batch.")]
    sequence_packing: Annotated[BatchingConfig, doc("Put the sequences of a micro-batch into one row without padding.")]
    dtensor_cfg: Annotated[DTensorConfig, doc("The DTensor backend.")]
    megatron_cfg: Annotated[MegatronConfig, doc("The Megatron backend.")] | None = None
    residency_overlap: Annotated[
        bool,
        doc("Let copies run beside compute. false waits for each one where it starts: for measuring and debugging."),
    ]
    residency_verify: Annotated[
        bool,
        doc("Compare host copies that count as valid with the device, byte by byte. Slow; for finding bugs."),
    ]
    host_memory_budget_gib: Annotated[
        float | None,
        doc(
            "Host memory that one worker may take for offloaded state and activations, in GiB. With null the "
            "workers of a host derive it together from the machine's memory, their cgroups and their resource "
            "limits. Set it where a machine grows its memory on use and therefore reports too little.",
            gt=0,
        ),
    ]
    gpu_memory_limit_gib: Annotated[
        float | None,
        doc(
            "GPU memory that one policy worker's tensors may take, in GiB, CUDA's context and the engine aside; null "
            "for all. For a GPU that others use too, or to try whether a run would fit a smaller one.",
            gt=0,
        ),
    ]
    memory_snapshot_dir: Annotated[
        str | None,
        doc("Folder for a snapshot of the CUDA allocator, one file a rank, when memory runs out; null for none."),
    ]
    reference_dir: Annotated[
        str | None,
        doc(
            "Folder for the frozen reference of GRPO and DPO, on a disk of each host: every worker writes its part "
            "once, into a file that has no name and is gone with it, and reads it for each pass. Takes 0.125 GiB of "
            "a worker's host memory. null keeps the reference in host memory."
        ),
    ]
    use_pinned_optimizer_offload: Annotated[
        bool,
        doc(
            "Keep offloaded state in one pinned host arena and copy asynchronously at the speed of the link; costs as "
            "much pinned host memory as the state. false uses pageable memory. Changes nothing on CPU."
        ),
    ]
    offload_optimizer_states_for_logprob: Annotated[
        bool, doc("Keep the optimizer on the host while logprobs are computed too: less GPU memory, more copies.")
    ]

    @property
    def backend(self) -> BackendConfig:
        """The section of the backend that trains the model."""
        if self.megatron_cfg is not None and self.megatron_cfg.enabled:
            return self.megatron_cfg
        return self.dtensor_cfg


@section
class TeacherDTensorConfig:
    """`teacher.dtensor_cfg`: how the teacher is spread over the devices, with that backend."""

    tensor_parallel_size: Annotated[
        int, doc("Devices that each layer of the teacher is split over; the student's may be another number.", ge=1)
    ]


@section
class TeacherConfig:
    """`teacher`: the model that the student learns from. What has no key here is as in `policy`.

    With Megatron it is spread over the devices as the policy is.
    """

    model_name: Annotated[
        str, doc("Folder or hub name of the teacher, with the tokenizer of `policy.model_name`.", min_length=1)
    ]
    hf_config_overrides: Annotated[dict[str, Any], doc("Values to set in its Hugging Face configuration.")]
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], doc("Type in which its weights are kept and computed with.")
    ]
    logprob_batch_size: Annotated[int, doc("Sequences in one forward pass of one worker.", ge=1)]
    logprob_chunk_size: Annotated[
        int | None, doc("Positions whose logits are searched for the top-k at once; null for all.", ge=1)
    ]
    stream_layers: Annotated[
        bool,
        doc(
            "Keep its layers on the host in its pass too: each comes for its own forward, two are on the device at "
            "once, and all of them are copied for every micro-batch. For a teacher that does not fit; with the DTensor "
            "backend."
        ),
    ]
    dtensor_cfg: Annotated[TeacherDTensorConfig, doc("With the DTensor backend.")]


@section
class RolloutKeys:
    """Keys of `policy` that a policy worker reads where an engine generates."""

    refit_buffer_size_gib: Annotated[
        float, doc("Size of each of the two buffers that carry weights to the engine, in GiB.", gt=0)
    ]
    residency: Annotated[
        Literal["always", "auto"],
        doc(
            "`always` moves every state group as in the residency table. `auto` leaves groups on the device "
            "during generation when they fit beside the engine (`gpu_memory_utilization` of the device); the "
            "resolved plan is logged once."
        ),
    ]
    residency_overrides: Annotated[
        dict[Literal["params", "optimizer"], Literal["device", "host"]],
        doc("Groups whose place during refit and generation is fixed, whatever `residency` is; {} for none."),
    ]


@section
class PolicyConfig(RolloutKeys, TrainedPolicyConfig):
    """`policy`: the model, how it is trained, where its state lives, and how it generates."""

    generation: Annotated[GenerationConfig, doc("Sampling and the inference engine.")]
