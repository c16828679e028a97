"""The YAML keys `policy.dtensor_cfg.*`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, Self

from nemo_offload_rl.keys.backend import ModelParallel
from nemo_offload_rl.keys.section import doc, section


@section
class DTensorLoraConfig:
    """`policy.dtensor_cfg.lora_cfg`: train low-rank adapters instead of the model's own weights."""

    enabled: Annotated[
        bool,
        doc(
            "Train adapters (LoRA) and freeze the model; exports have merged weights, refits these or adapters "
            "(`policy.generation.enable_lora`)."
        ),
    ] = False
    target_modules: Annotated[
        tuple[str, ...],
        doc(
            "Linear layers that get adapters: names such as `q_proj`, or patterns of full names such as "
            "`*.layers.0.*`; `*` is every layer, including the output layer. Empty with `match_all_linear`."
        ),
    ] = ()
    exclude_modules: Annotated[tuple[str, ...], doc("Names or patterns of layers that get no adapters.")] = ()
    match_all_linear: Annotated[bool, doc("Add adapters to every linear layer except the output layer.")] = True
    dim: Annotated[int, doc("Rank of the adapters.", ge=1)] = 8
    alpha: Annotated[int, doc("Adapter outputs are scaled by alpha / dim.", ge=1)] = 32
    dropout: Annotated[float, doc("Dropout probability of an adapter's inputs in training.", ge=0, lt=1)] = 0.0
    lora_A_init: Annotated[
        Literal["xavier", "uniform"], doc("Initialization of A: Xavier normal, or peft's uniform. B starts at zero.")
    ] = "xavier"


@section
class DTensorConfig:
    """`policy.dtensor_cfg`: FSDP2 and DTensor tensor parallelism on Hugging Face models."""

    enabled: Annotated[bool, doc("Use this backend. Exactly one of dtensor_cfg and megatron_cfg is enabled.")] = True
    tensor_parallel_size: Annotated[int, doc("Devices that each layer is sharded over.", ge=1)] = 1
    context_parallel_size: Annotated[
        int,
        doc(
            "Devices that each row is split over, for rows whose activations do not fit on one device; the results are "
            "the same. Excludes `policy.sequence_packing`, `torch_compile`, `activation_offload` and an "
            "`expert_parallel_size` above 1.",
            ge=1,
        ),
    ] = 1
    expert_parallel_size: Annotated[
        int,
        doc(
            "Data-parallel devices that the experts of each layer are distributed over; tokens are sent to their "
            "experts' devices. Must divide the number of data-parallel devices and of experts; needs "
            "`tensor_parallel_size` 1.",
            ge=1,
        ),
    ] = 1
    sequence_parallel: Annotated[
        bool,
        doc(
            "Also shard norms, dropout and the residual stream along the sequence: fewer activations per device, the "
            "same results. Needs `tensor_parallel_size` above 1."
        ),
    ] = False
    activation_checkpointing: Annotated[
        bool, doc("Recompute activations in backward passes instead of keeping them.")
    ] = False
    activation_offload: Annotated[
        bool,
        doc(
            "Offload the inputs of recomputed layers to the host, and prefetch them in time for the backward pass. "
            "Needs `activation_checkpointing` and `tensor_parallel_size` 1."
        ),
    ] = False
    activation_offload_fraction: Annotated[
        float,
        doc(
            "Must be 1.0 with `activation_offload`, which offloads the inputs of all layers but the last; another "
            "value is refused.",
            gt=0,
            le=1,
        ),
    ] = 1.0
    activation_offload_host_limit_gib: Annotated[
        float,
        doc("Pinned host memory in GiB per worker for these inputs; what does not fit stays on the device.", gt=0),
    ] = 64.0
    torch_compile: Annotated[
        bool,
        doc(
            "Compile the layers with torch.compile, while the engine starts or in the first step. Steps are then "
            "faster and need less memory. Compiling takes half a minute, less if an earlier run left the compiled code "
            "on disk. Needs `tensor_parallel_size` 1. No effect on CPU or on layers with experts."
        ),
    ] = True
    cpu_offload: Annotated[
        bool,
        doc(
            "For models larger than the GPU: keep parameters, gradients and optimizer states on the host, and stream "
            "them through the device part by part (a layer, the embedding, the output layer) in every pass and in the "
            "update, which runs on the device. A pass takes each layer with many micro-batches, so that a part is "
            "copied once in each direction; with `activation_offload`, once per micro-batch. Needs "
            "`activation_checkpointing` and one policy worker; excludes dropout and `lora_cfg`."
        ),
    ] = False
    offload_optimizer_states: Annotated[
        bool,
        doc(
            "Keep optimizer states on the host except around the optimizer step. They are prefetched during the "
            "preceding micro-batches if there is room, and offloaded during the next forward pass. The update runs on "
            "the device."
        ),
    ] = False
    offload_optimizer_states_fraction: Annotated[
        float,
        doc(
            "Fraction of those states to offload, with `offload_optimizer_states`; the rest stays resident.", gt=0, le=1
        ),
    ] = 1.0
    offload_optimizer_states_chunk_mib: Annotated[
        float | None,
        doc(
            "With `offload_optimizer_states`: stream the states in parts of this many MiB. During the step at least "
            "two parts are on the device, more if passes leave room. null uses one part, which needs room for all "
            "states.",
            gt=0,
        ),
    ] = None
    lora_cfg: Annotated[DTensorLoraConfig, doc("Low-rank adapters (LoRA).")]

    # What `BackendConfig` describes, like the properties below.
    section = "dtensor_cfg"
    streaming_section = "policy.dtensor_cfg"
    activation_key = "policy.dtensor_cfg.activation_offload"
    keeps_optimizer_on_host = False  # updates run on the device

    @property
    def streamed_share(self) -> float:
        """All with `cpu_offload`, else the fraction of `offload_optimizer_states`."""
        if self.cpu_offload:
            return 1.0
        return self.offload_optimizer_states_fraction if self.offload_optimizer_states else 0.0

    @property
    def streams_parameters(self) -> bool:
        """With `cpu_offload`."""
        return self.cpu_offload

    @property
    def streams_in_parts(self) -> bool:
        """With `cpu_offload`, or with a chunk size."""
        in_parts = self.offload_optimizer_states and self.offload_optimizer_states_chunk_mib is not None
        return in_parts or self.cpu_offload

    @property
    def model_parallel(self) -> ModelParallel:
        """Tensor- and context-parallel ranks."""
        return ModelParallel(self.tensor_parallel_size, self.context_parallel_size)

    @property
    def worker_env_vars(self) -> Mapping[str, str]:
        """None."""
        return {}

    def without_streaming(self) -> Self:
        """Copy the section with `offload_optimizer_states` false."""
        return replace(self, offload_optimizer_states=False)
