"""The YAML keys `policy.dtensor_cfg.*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, Self

from nemo_offload_rl.policy.backends.config import ModelParallel
from nemo_offload_rl.schema import doc, section


@section
class DTensorLoraConfig:
    """`policy.dtensor_cfg.lora_cfg`: train low-rank adapters instead of the model's own weights."""

    enabled: Annotated[bool, doc("Use it. The model's weights are frozen; a refit and an export send merged ones.")]
    target_modules: Annotated[
        tuple[str, ...],
        doc(
            "Linear layers that get adapters: names as `q_proj`, or patterns of whole names as `*.layers.0.*`; `*` is "
            "every one, the output layer included. Not read with `match_all_linear`."
        ),
    ]
    exclude_modules: Annotated[tuple[str, ...], doc("Names or patterns of layers that get none.")]
    match_all_linear: Annotated[bool, doc("Every linear layer but the output layer gets adapters.")]
    dim: Annotated[int, doc("Rank of the adapters.", ge=1)]
    alpha: Annotated[int, doc("Their product is multiplied by alpha / dim.", ge=1)]
    dropout: Annotated[float, doc("Share of an adapter's inputs that are dropped in training.", ge=0, lt=1)]
    lora_A_init: Annotated[
        Literal["xavier", "uniform"], doc("First values of A: Xavier's normal, or peft's uniform. B begins with zeros.")
    ]


@section
class DTensorConfig:
    """`policy.dtensor_cfg`: FSDP2 and DTensor tensor parallelism on Hugging Face models."""

    enabled: Annotated[bool, doc("Use this backend. Exactly one of dtensor_cfg and megatron_cfg is enabled.")]
    tensor_parallel_size: Annotated[int, doc("Devices that each layer is split over.", ge=1)]
    context_parallel_size: Annotated[
        int,
        doc(
            "Devices that share each row, with the same numbers: for rows whose activations one device does not hold. "
            "Excludes `policy.sequence_packing`, `torch_compile`, `activation_offload` and an `expert_parallel_size` "
            "above 1.",
            ge=1,
        ),
    ]
    expert_parallel_size: Annotated[
        int,
        doc(
            "Data-parallel devices that share the experts of each layer: each holds its part of them, and tokens go to "
            "the device of their experts. Divides the data-parallel devices and the experts; needs "
            "`tensor_parallel_size` 1.",
            ge=1,
        ),
    ]
    sequence_parallel: Annotated[
        bool,
        doc(
            "Also split norms, dropout and the residual stream along the sequence, with the same numbers: fewer "
            "activations on each device. Needs `tensor_parallel_size` above 1."
        ),
    ]
    activation_checkpointing: Annotated[
        bool, doc("Recompute activations in the backward pass instead of keeping them.")
    ]
    activation_offload: Annotated[
        bool,
        doc(
            "Move what decoder layers keep for the backward pass to the host, and back ahead of it; with "
            "`activation_checkpointing` the layers' inputs. Needs `tensor_parallel_size` 1."
        ),
    ]
    activation_offload_fraction: Annotated[
        float,
        doc(
            "Share of the layers, from the first one on, whose activations move; those of the last layer stay.",
            gt=0,
            le=1,
        ),
    ]
    activation_offload_host_limit_gib: Annotated[
        float, doc("GiB of pinned host memory of one worker for them; what does not fit stays on the device.", gt=0)
    ]
    torch_compile: Annotated[
        bool,
        doc(
            "Compile the layers with torch.compile: faster and smaller, for half a minute at the first step (kept on "
            "disk between runs). Needs `tensor_parallel_size` 1. Changes nothing on CPU, nor layers with experts."
        ),
    ]
    cpu_offload: Annotated[
        bool,
        doc(
            "For models larger than the GPU: parameters, gradients and optimizer states are on the host, and pass "
            "through the device part by part (a layer, the embedding, the output layer), in every pass and in the "
            "update, which the device computes. With `activation_checkpointing`, without `activation_offload`, "
            "training passes go layer by layer over many micro-batches, so that a part crosses once in each direction; "
            "else once for every micro-batch. For one policy worker, without `lora_cfg`."
        ),
    ]
    offload_optimizer_states: Annotated[
        bool,
        doc(
            "Keep optimizer states on the host except around the optimizer step: they return beside the micro-batches "
            "before it where there is room, and leave beside the next forward pass. The update stays on the device."
        ),
    ]
    offload_optimizer_states_fraction: Annotated[
        float, doc("Share of those states that leaves, with `offload_optimizer_states`; the rest stays.", gt=0, le=1)
    ]
    offload_optimizer_states_chunk_mib: Annotated[
        float | None,
        doc(
            "With `offload_optimizer_states`: states come, are updated and leave in parts of this many MiB. At least "
            "two are on the device in the step, and more as far as there is room beside the passes. null for one "
            "part, which needs room for all of the states.",
            gt=0,
        ),
    ]
    lora_cfg: Annotated[DTensorLoraConfig, doc("Low-rank adapters (LoRA).")]

    @property
    def section(self) -> str:
        """See `BackendConfig`, as for all below."""
        return "dtensor_cfg"

    @property
    def streaming_section(self) -> str:
        """This one."""
        return "policy.dtensor_cfg"

    @property
    def activation_key(self) -> str:
        """That of this backend."""
        return "policy.dtensor_cfg.activation_offload"

    @property
    def streamed_share(self) -> float:
        """As the keys say."""
        if self.cpu_offload:
            return 1.0
        return self.offload_optimizer_states_fraction if self.offload_optimizer_states else 0.0

    @property
    def streams_parameters(self) -> bool:
        """As the key says."""
        return self.cpu_offload

    @property
    def streams_in_parts(self) -> bool:
        """As the keys say."""
        in_parts = self.offload_optimizer_states and self.offload_optimizer_states_chunk_mib is not None
        return in_parts or self.cpu_offload

    @property
    def keeps_optimizer_on_host(self) -> bool:
        """Never."""
        return False

    @property
    def model_parallel(self) -> ModelParallel:
        """Tensor and context parallelism."""
        return ModelParallel(self.tensor_parallel_size, self.context_parallel_size)

    @property
    def worker_env_vars(self) -> Mapping[str, str]:
        """Nothing."""
        return {}

    def without_streaming(self) -> Self:
        """The same with `offload_optimizer_states` false."""
        return replace(self, offload_optimizer_states=False)
