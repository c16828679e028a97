"""The YAML keys `policy.*`, without those of the training backends (`keys/dtensor.py`, `keys/megatron.py`)."""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from nemo_offload_rl.keys.backend import BackendConfig
from nemo_offload_rl.keys.data import TokenizerConfig
from nemo_offload_rl.keys.dtensor import DTensorConfig
from nemo_offload_rl.keys.generation import GenerationConfig
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.section import doc, section, value_of

AUTO = "auto"
AUTO_KEYS = ("train_micro_batch_size", "logprob_batch_size")
"""Keys that may be `auto` in a file; a number replaces it before the keys are checked."""


@section
class OptimizerConfig:
    """`policy.optimizer`: the optimizer of the DTensor backend."""

    name: Annotated[
        str,
        doc(
            "Dotted path of a torch optimizer class, such as `torch.optim.AdamW`; `nemo_offload_rl.optim.AdamW` "
            "keeps its moments in 16 bits."
        ),
    ]
    kwargs: Annotated[dict[str, Any], doc("Its arguments: `lr`, `weight_decay`, `betas`, `eps`, ...")]
    decay_norm_and_bias: Annotated[
        bool,
        doc(
            "Apply `weight_decay` to norms and biases too, as torch does with all parameters in one group. false "
            "excludes them, as Megatron does."
        ),
    ] = True


@section
class SchedulerPhaseConfig:
    """An entry of `policy.scheduler`: one phase of the learning-rate schedule."""

    name: Annotated[str, doc("Dotted path of a torch scheduler class, such as `torch.optim.lr_scheduler.LinearLR`.")]
    kwargs: Annotated[dict[str, Any], doc("Its arguments.")]


@section
class SchedulerMilestonesConfig:
    """The last entry of `policy.scheduler` if there are several phases."""

    milestones: Annotated[
        tuple[int, ...], doc("Steps of the run at which the second, third, ... phase begins, in ascending order.")
    ]


def _scheduler_tag(entry: Any) -> str:
    return "milestones" if isinstance(entry, dict) and "milestones" in entry else "phase"


SchedulerEntry = Annotated[
    Annotated[SchedulerPhaseConfig, Tag("phase")] | Annotated[SchedulerMilestonesConfig, Tag("milestones")],
    Discriminator(_scheduler_tag),
]


@section
class BatchingConfig:
    """`policy.dynamic_batching` and `policy.sequence_packing`: micro-batches of up to so many tokens."""

    enabled: Annotated[
        bool, doc("Form micro-batches in this way. Dynamic batching and sequence packing exclude each other.")
    ] = False
    train_mb_tokens: Annotated[int, doc("Maximum tokens in a training micro-batch, padding included.", ge=1)] = (
        value_of("${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}")
    )
    logprob_mb_tokens: Annotated[int, doc("Maximum tokens in a logprob micro-batch, padding included.", ge=1)] = (
        value_of("${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}")
    )
    sequence_length_round: Annotated[int, doc("Round lengths up to a multiple of this many tokens.", ge=1)] = 64


@section
class TrainedPolicyConfig:
    """`policy`: the model, how it is trained and where its state is kept. SFT and DPO have these keys only."""

    model_name: Annotated[str, doc("Local folder or hub name of a Hugging Face causal language model.", min_length=1)]
    tokenizer: Annotated[TokenizerConfig, doc("The tokenizer.")]
    hf_config_overrides: Annotated[
        dict[str, Any], doc("Values to override in the model's Hugging Face configuration.")
    ] = field(default_factory=dict[str, Any])
    dropout: Annotated[
        bool,
        doc(
            "Train with the dropout of the model's configuration (`attention_dropout`, `residual_dropout`, ...). RL "
            "and DPO compare logprobs of several passes, which dropout would make differ: their exemplars have false, "
            "that of SFT has true. Adapters have a dropout of their own."
        ),
    ] = False
    train_global_batch_size: Annotated[
        int, doc("Sequences per optimizer step, over all workers: responses, or pairs in DPO.", ge=1)
    ]
    train_micro_batch_size: Annotated[
        int,
        doc(
            "Sequences per worker in one forward and backward pass; `auto` lets the plan choose, and takes up to 4 on "
            "a CPU.",
            ge=1,
        ),
    ]
    logprob_batch_size: Annotated[
        int, doc("Sequences per worker in one forward pass for logprobs; `auto` as for training.", ge=1)
    ] = value_of("${policy.train_micro_batch_size}")
    logprob_chunk_size: Annotated[
        int | None, doc("Compute logits for this many positions at a time, to save memory; null for all at once.", ge=1)
    ] = None
    max_total_sequence_length: Annotated[int, doc("Maximum length of prompt plus response in tokens.", ge=2)]
    make_sequence_length_divisible_by: Annotated[int, doc("Pad batches to a multiple of this many tokens.", ge=1)] = (
        value_of("${policy.dtensor_cfg.tensor_parallel_size}")
    )
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"],
        doc("Type of the computations. With DTensor, parameters and optimizer states are float32."),
    ] = "bfloat16"
    deterministic: Annotated[
        bool,
        doc(
            "Use only operations that give the same bits each time. Slower; for comparing runs. Other operations end "
            "the run with DTensor, and log a warning with Megatron. On Hopper GPUs, memory of Megatron's attention in "
            "packed rows then grows with the square of a pack's tokens; a run that does not fit is refused."
        ),
    ] = False
    max_grad_norm: Annotated[float | None, doc("Clip gradients to this norm; null for no limit.", gt=0)] = 1.0
    max_skipped_updates: Annotated[
        int,
        doc(
            "How many updates in a row may have a gradient norm that is not finite; one more ends the run. All workers "
            "skip such an update: parameters, optimizer and schedule stay unchanged.",
            ge=0,
        ),
    ] = 5
    optimizer: Annotated[OptimizerConfig | None, doc("Optimizer of the DTensor backend; null with Megatron.")]
    scheduler: Annotated[
        tuple[SchedulerEntry, ...] | None,
        doc("Phases of the learning rate, then their milestones; null keeps it constant."),
    ]
    dynamic_batching: Annotated[BatchingConfig, doc("Group sequences of similar length into micro-batches.")]
    sequence_packing: Annotated[
        BatchingConfig, doc("Put the sequences of a micro-batch into one row, without padding.")
    ]
    dtensor_cfg: Annotated[DTensorConfig, doc("The DTensor backend.")]
    megatron_cfg: Annotated[MegatronConfig, doc("The Megatron backend.")] | None = None
    residency_overlap: Annotated[
        bool,
        doc("Run copies during other work. false waits for each copy where it starts: for measuring and debugging."),
    ] = True
    residency_verify: Annotated[
        bool,
        doc("Compare each host copy that counts as valid with the device, byte by byte. Slow; for finding bugs."),
    ] = False
    host_memory_budget_gib: Annotated[
        float | None,
        doc(
            "Host memory in GiB that one worker may use for offloaded state and activations. null: the workers of a "
            "host share what the machine, their cgroups and their resource limits leave. Set it if the machine "
            "reports less memory than it has, as one whose memory grows on use does.",
            gt=0,
        ),
    ] = None
    gpu_memory_limit_gib: Annotated[
        float | None,
        doc(
            "Limit in GiB on the GPU memory for tensors of one policy worker, without CUDA's context and the engine; "
            "null for none. For a shared GPU, or to test whether a run would fit on a smaller one.",
            gt=0,
        ),
    ] = None
    memory_snapshot_dir: Annotated[
        str | None,
        doc("Folder for snapshots of the CUDA allocator when memory runs out, one file per rank; null for none."),
    ] = None
    use_pinned_optimizer_offload: Annotated[
        bool,
        doc(
            "Keep offloaded state in one pinned buffer on the host, which is as large as that state, and copy it "
            "asynchronously at the full speed of the link. On by default, since pageable memory (false) made a step 42 "
            "% longer (docs/measurements/residency.md). No effect on CPU."
        ),
    ] = True
    offload_optimizer_states_for_logprob: Annotated[
        bool,
        doc(
            "Keep the optimizer on the host during logprob passes too, for runs whose GPU memory peaks there. Off by "
            "default, since training then waits for its copies."
        ),
    ] = False

    def length_multiple(self, batching: BatchingConfig) -> int:
        """Return the multiple to round lengths up to: one of `sequence_length_round` that needs no more padding."""
        padded = self.make_sequence_length_divisible_by
        return -(-batching.sequence_length_round // padded) * padded

    @property
    def backend(self) -> BackendConfig:
        """The section of the backend that trains the model."""
        if self.megatron_cfg is not None and self.megatron_cfg.enabled:
            return self.megatron_cfg
        return self.dtensor_cfg


@section
class TeacherDTensorConfig:
    """`teacher.dtensor_cfg`: how the DTensor backend spreads the teacher over the devices."""

    tensor_parallel_size: Annotated[
        int, doc("Devices that each layer of the teacher is sharded over; may differ from the student's.", ge=1)
    ] = 1


@section
class TeacherConfig:
    """`teacher`: the model that the student learns from. All other settings are those of `policy`.

    Megatron spreads it over the devices like the policy.
    """

    model_name: Annotated[
        str,
        doc("Local folder or hub name of the teacher; it must use the tokenizer of `policy.model_name`.", min_length=1),
    ]
    hf_config_overrides: Annotated[
        dict[str, Any], doc("Values to override in the teacher's Hugging Face configuration.")
    ] = field(default_factory=dict[str, Any])
    precision: Annotated[Literal["float32", "bfloat16", "float16"], doc("Type of its weights and compute.")] = (
        "bfloat16"
    )
    logprob_batch_size: Annotated[int, doc("Sequences per worker in one forward pass.", ge=1)] = value_of(
        "${policy.logprob_batch_size}"
    )
    logprob_chunk_size: Annotated[
        int | None, doc("Compute top-k logits for this many positions at a time; null for all at once.", ge=1)
    ] = value_of("${policy.logprob_chunk_size}")
    stream_layers: Annotated[
        bool,
        doc(
            "For a teacher that does not fit: keep its layers on the host, and copy each one to the device for its "
            "forward pass. Two layers are on the device at a time, and every micro-batch copies all of them. DTensor "
            "backend only."
        ),
    ] = False
    dtensor_cfg: Annotated[TeacherDTensorConfig, doc("Settings with the DTensor backend.")]


@section
class RouterReplayConfig:
    """`policy.router_replay`: the choice of the experts that a mixture's tokens pass through in training."""

    enabled: Annotated[
        bool,
        doc(
            "Logprob and training passes send each token to the experts that the engine chose for it, in every layer, "
            "weighted by the policy's present router. The frozen reference and a teacher choose their own. Needs a "
            "mixture of experts."
        ),
    ] = False


@section
class RolloutKeys:
    """Keys of `policy` in runs with an engine."""

    router_replay: Annotated[RouterReplayConfig, doc("Choice of the experts that tokens pass through in training.")]

    refit_buffer_size_gib: Annotated[
        float, doc("Size in GiB of each of the two buffers that transfer weights to the engine.", gt=0)
    ] = 1.0
    residency: Annotated[
        Literal["always", "auto"],
        doc(
            "`always` moves every state group as in the residency table. `auto` keeps those groups on the device "
            "during generation that fit next to the engine (`gpu_memory_utilization`). The log shows the resulting "
            "plan."
        ),
    ] = "always"
    residency_overrides: Annotated[
        dict[Literal["params", "base", "optimizer"], Literal["device", "host"]],
        doc(
            "Groups with a fixed place during refit and generation, whatever `residency` says; {} for none. `base` is "
            "the frozen model under adapters. With `base: host` (DTensor), refits of merged weights read it from the "
            "host, weight by weight, so that the GPU need not hold it and the engine's weights together."
        ),
    ] = field(default_factory=dict[Any, Any])
    suspend_nccl_comms: Annotated[
        bool,
        doc(
            "Release the GPU memory of the policy's NCCL communicators during generation, and take it again before "
            "the policy's next phase. Needs NCCL 2.29.7 or later, which is newer than torch's."
        ),
    ] = False


@section
class PolicyConfig(RolloutKeys, TrainedPolicyConfig):
    """`policy`: the model, how it is trained, where its state lives, and how it generates."""

    generation: Annotated[GenerationConfig, doc("Sampling and the inference engine.")]
