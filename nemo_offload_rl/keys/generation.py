"""The YAML keys `policy.generation.*`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from nemo_offload_rl.errors import division_problem
from nemo_offload_rl.keys.section import doc, section, value_of

KEPT_LAYERS = ("num_first_layers_in_bf16", "num_last_layers_in_bf16", "quantization_ignored_layer_kws")
"""Keys of layers that an engine with 8-bit weights keeps in bfloat16."""
SERVING_CHAT_KWARGS = ("enable_auto_tools", "tool_parser", "reasoning_parser")


@section
class VllmConfig:
    """`policy.generation.vllm_cfg`: one vLLM engine."""

    async_engine: Annotated[bool, doc("Use vLLM's asynchronous engine.")] = False
    precision: Annotated[
        Literal["float32", "bfloat16", "float16", "fp8"],
        doc(
            "Type of the engine's weights and compute. `fp8`: weights of linear layers and experts in 8 bits, "
            "quantized at each refit in blocks of 128 x 128, and their inputs as they come; embedding, output layer, "
            "norms and routers in bfloat16. Needs a GPU of compute capability 8.9 or higher."
        ),
    ]
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"], doc("Type of the KV cache; `auto` is that of `precision`, and bfloat16 for `fp8`.")
    ] = "auto"
    use_deep_gemm: Annotated[
        bool, doc("With `precision: fp8`: multiply with DeepGEMM's kernels (Hopper) where vLLM has them.")
    ] = False
    num_first_layers_in_bf16: Annotated[
        int, doc("With `precision: fp8`: number of first layers whose weights stay in bfloat16.", ge=0)
    ] = 0
    num_last_layers_in_bf16: Annotated[
        int, doc("With `precision: fp8`: number of last layers whose weights stay in bfloat16.", ge=0)
    ] = 0
    quantization_ignored_layer_kws: Annotated[
        tuple[str, ...],
        doc(
            "With `precision: fp8`: modules whose name contains one of these texts stay in bfloat16; fused ones "
            "(`qkv_proj`) if one of their parts (`q_proj`) does."
        ),
    ] = ()
    tensor_parallel_size: Annotated[int, doc("Devices that one engine is sharded over.", ge=1)] = 1
    expert_parallel_size: Annotated[
        int,
        doc(
            "Number of an engine's devices that whole experts are distributed over: `tensor_parallel_size`, or 1 to "
            "split every expert over all devices. The memory is the same, and numbers differ by rounding only.",
            ge=1,
        ),
    ] = 1
    gpu_memory_utilization: Annotated[
        float, doc("Fraction of the GPU's memory that the engine may use while awake.", gt=0, lt=1)
    ] = 0.6
    kv_cache_memory_gib: Annotated[
        float | None, doc("Fixed size of the KV cache in GiB, instead of that fraction; null is 1 GiB on CPU.", gt=0)
    ] = None
    enable_sleep_mode: Annotated[
        bool,
        doc(
            "Release the engine's memory between generations. With false the engine stays in GPU memory during "
            "training, and the policy during generation: for GPUs that hold both."
        ),
    ] = True
    max_model_len: Annotated[
        int, doc("Maximum length of prompt plus response in tokens; the engine ends every response there.", ge=2)
    ]
    enforce_eager: Annotated[
        bool, doc("Do not use CUDA graphs: slower generation, faster start. No effect on CPU.")
    ] = False
    per_request_seeds: Annotated[
        bool,
        doc(
            "Sample each response with its own seed, made of `grpo.seed`, step and prompt. Samples then do not depend "
            "on how the engine batches requests, and are the same after a resume. vLLM samples row by row in this "
            "mode, which took no longer with 512 concurrent responses. false samples all responses from one generator "
            "of the engine, seeded with `grpo.seed`."
        ),
    ] = True
    max_restarts: Annotated[
        int,
        doc(
            "How often per run the engines may be restarted after one of them dies, hangs or lacks the memory to wake. "
            "The interrupted generation is repeated. 0 ends the run at the first failure.",
            ge=0,
        ),
    ] = 0
    expose_http_server: Annotated[
        bool,
        doc(
            "Serve `/v1/chat/completions` from each engine, for environments that use HTTP (docs/guides/agents.md). "
            "Needs `async_engine`."
        ),
    ] = False
    http_server_host: Annotated[
        str,
        doc(
            "Address that the engines listen on. Any address that other machines can reach needs a token in the "
            "environment variable `NEMO_OFFLOAD_RL_TOKEN`, which requests must send.",
            min_length=1,
        ),
    ] = "127.0.0.1"
    http_server_port: Annotated[
        int,
        doc(
            "Port of the first engine; each further engine uses the next one. 0 uses any free port.",
            ge=0,
            le=65535,
        ),
    ] = 0
    http_server_serving_chat_kwargs: Annotated[
        dict[str, Any] | None,
        doc(
            "Arguments of vLLM's `OpenAIServingChat`: `enable_auto_tools`, `tool_parser` and `reasoning_parser`. "
            "null leaves tool calls and reasoning in the text."
        ),
    ] = None

    @property
    def problem_of_precision(self) -> str | None:
        """Describe what contradicts `precision`, to follow this section's name and a dot; None if nothing does."""
        given = [name for name in ("use_deep_gemm", *KEPT_LAYERS) if getattr(self, name)]
        if self.is_quantized or not given:
            return None
        return (
            f"{given[0]} is set, but precision is {self.precision} and no weights are in 8 bits; remove it, or set "
            "precision to fp8"
        )

    @property
    def problem_of_experts(self) -> str | None:
        """Describe what contradicts `expert_parallel_size`, as `problem_of_precision` does; None if nothing does."""
        experts, devices = self.expert_parallel_size, self.tensor_parallel_size
        if experts in (1, devices):
            return None
        return (
            f"expert_parallel_size is {experts}, but tensor_parallel_size is {devices}, and an engine shares out its "
            f"experts over its own devices; set it to {devices}, or both to {experts}"
        )

    @property
    def is_quantized(self) -> bool:
        """Tell whether the engine has 8-bit weights."""
        return self.precision == "fp8"

    @property
    def differs_from_policy(self) -> bool:
        """Whether the engine computes in 8 bits what the policy computes in more."""
        return self.is_quantized or self.kv_cache_dtype == "fp8"

    @property
    def dtype(self) -> str:
        """Type of compute, and of all weights that are not quantized."""
        return "bfloat16" if self.is_quantized else self.precision


@section
class ColocatedResourcesConfig:
    """`policy.generation.colocated.resources`: devices of the engines if they do not share the trainer's."""

    gpus_per_node: Annotated[
        int | None,
        doc(
            "GPUs (on CPU: workers) per node for generation, in addition to those of `cluster`; null when colocated.",
            ge=1,
        ),
    ] = None
    num_nodes: Annotated[int | None, doc("Nodes for generation; null when colocated.", ge=1)] = None


@section
class ColocatedConfig:
    """`policy.generation.colocated`: whether engine and trainer share devices."""

    enabled: Annotated[
        bool,
        doc(
            "Engine and trainer take turns on the same devices. With false each has its own devices, and nothing is "
            "offloaded for generation."
        ),
    ] = True
    resources: Annotated[ColocatedResourcesConfig, doc("Devices of the engines when not colocated.")]


@section
class GenerationConfig:
    """`policy.generation`: how responses are sampled, and by which engine."""

    backend: Annotated[Literal["vllm"], doc("The inference engine.")] = "vllm"
    max_new_tokens: Annotated[
        int,
        doc("Maximum response length in tokens; `vllm_cfg.max_model_len` may end a response earlier.", ge=1),
    ]
    temperature: Annotated[float, doc("Sampling temperature of rollouts; 0 is greedy.", ge=0)] = 1.0
    top_p: Annotated[
        float,
        doc(
            "Nucleus sampling: probability to keep. Logprobs of engine and policy are normalized over the tokens that "
            "`top_k` and `top_p` keep, as in NeMo-RL; the reference's logprobs and the KL are over all tokens.",
            gt=0,
            le=1,
        ),
    ] = 1.0
    top_k: Annotated[
        int | None,
        doc("Sample from this many of the most likely tokens; null for all. Logprobs: see `top_p`.", ge=1),
    ] = None
    val_temperature: Annotated[float, doc("`temperature` for validation.", ge=0)] = value_of("${.temperature}")
    val_top_p: Annotated[float, doc("`top_p` for validation.", gt=0, le=1)] = value_of("${.top_p}")
    val_top_k: Annotated[int | None, doc("`top_k` for validation.", ge=1)] = value_of("${.top_k}")
    stop_token_ids: Annotated[
        tuple[int, ...] | None,
        doc("Token ids that end a response, in addition to the tokenizer's end-of-sequence token."),
    ] = None
    stop_strings: Annotated[tuple[str, ...] | None, doc("Strings that end a response.")] = None
    vllm_cfg: Annotated[VllmConfig, doc("The vLLM engine.")]
    vllm_kwargs: Annotated[
        dict[str, Any],
        doc(
            "Further arguments of `vllm.LLM` that affect its speed or what it reports. Arguments that change the "
            "model, its placement or the sampling are rejected with the reason."
        ),
    ] = field(default_factory=dict[str, Any])
    enable_lora: Annotated[
        bool | None,
        doc(
            "With adapters (LoRA): the engine applies them itself. Refits send the adapters alone, and to an engine "
            "that sleeps the model's own weights too. With false, refits send weights with the adapters merged into "
            "them. null is true for an engine with devices of its own that can (docs/guides/lora.md), else false."
        ),
    ] = None
    colocated: Annotated[ColocatedConfig, doc("Where the engines run.")]

    @property
    def engines_sleep(self) -> bool:
        """Whether the engines sleep while the policy trains on their devices."""
        return self.colocated.enabled and self.vllm_cfg.enable_sleep_mode

    @property
    def sampling(self) -> SamplingSettings:
        """How rollouts are sampled."""
        return self._sampling(self.temperature, self.top_p, self.top_k)

    @property
    def val_sampling(self) -> SamplingSettings:
        """How validation is sampled."""
        return self._sampling(self.val_temperature, self.val_top_p, self.val_top_k)

    def _sampling(self, temperature: float, top_p: float, top_k: int | None) -> SamplingSettings:
        return SamplingSettings(
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_token_ids=self.stop_token_ids or (),
            stop_strings=self.stop_strings or (),
        )


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How tokens are sampled. `temperature` 0 is greedy; `top_k` None keeps all.

    Logprobs are at `temperature`, normalized over the tokens that `top_k` and `top_p` keep, like the policy's.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None


def engine_devices_problem(
    tensor_parallel_size: int,
    num_devices: int,
    *,
    section: str = "policy.generation",
    devices: str = "devices of a host",
) -> str | None:
    """Say that engines of this size do not fill the devices of a host; None where they do.

    Args:
        tensor_parallel_size: Devices of one engine, which stays on one host.
        num_devices: Devices of a host.
        section: Section of the YAML with `vllm_cfg`.
        devices: Name of the devices, or of the key that counts them.
    """
    sizes = {f"{section}.vllm_cfg.tensor_parallel_size": tensor_parallel_size}
    return division_problem(sizes, num_devices, f"{devices}, and one engine stays on one host", "choose a divisor")
