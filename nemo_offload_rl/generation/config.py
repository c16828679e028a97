"""The YAML keys `policy.generation.*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from nemo_offload_rl.generation.interfaces import SamplingSettings
from nemo_offload_rl.schema import doc, section

SERVING_CHAT_KWARGS = ("enable_auto_tools", "tool_parser", "reasoning_parser")


@section
class VllmConfig:
    """`policy.generation.vllm_cfg`: one vLLM engine."""

    async_engine: Annotated[bool, doc("Use vLLM's asynchronous engine.")]
    precision: Annotated[Literal["float32", "bfloat16", "float16"], doc("Type of the engine's weights and compute.")]
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], doc("Type of the KV cache; `auto` is `precision`.")]
    tensor_parallel_size: Annotated[int, doc("Devices that one engine is spread over.", ge=1)]
    gpu_memory_utilization: Annotated[
        float, doc("Share of the GPU's memory that the engine may fill while it is awake.", gt=0, lt=1)
    ]
    kv_cache_memory_gib: Annotated[
        float | None, doc("A fixed KV cache size in GiB instead of that share; needed on CPU.", gt=0)
    ]
    enable_sleep_mode: Annotated[
        bool,
        doc(
            "Release the engine's memory between generations. false keeps it for the whole run, training "
            "included, and the policy is not offloaded for generation: for GPUs that hold both."
        ),
    ]
    max_model_len: Annotated[
        int, doc("Longest prompt plus response that the engine takes, in tokens: it ends every response there.", ge=2)
    ]
    enforce_eager: Annotated[bool, doc("No CUDA graphs: slower to generate, quicker to start.")]
    per_request_seeds: Annotated[
        bool,
        doc(
            "Draw every response from a seed of its own, derived from `grpo.seed`, step and prompt. A run is "
            "then reproducible however the engine batches its requests, also after a resume. vLLM draws row "
            "by row then; with 512 responses at a time that took no longer. false draws all from one "
            "generator of the engine, seeded with `grpo.seed`."
        ),
    ]
    max_restarts: Annotated[
        int,
        doc(
            "How often in a run the engines may be restarted after one of them died or found no memory to "
            "wake in; the interrupted generation is repeated. 0 ends the run at the first failure.",
            ge=0,
        ),
    ]
    expose_http_server: Annotated[
        bool,
        doc(
            "Serve `/v1/chat/completions` from each engine, for environments that talk HTTP (docs/guides/agents.md); "
            "needs `async_engine`. Left out: false."
        ),
    ] = False
    http_server_host: Annotated[
        str,
        doc(
            "Address that the engines listen on. Any but a loopback address needs the environment variable "
            "`NEMO_OFFLOAD_RL_TOKEN`, which requests then bear. Left out: 127.0.0.1.",
            min_length=1,
        ),
    ] = "127.0.0.1"
    http_server_port: Annotated[
        int,
        doc("Port of the first engine, the next one's is one more; 0, or left out: any that is free.", ge=0, le=65535),
    ] = 0
    http_server_serving_chat_kwargs: Annotated[
        dict[str, Any] | None,
        doc(
            "Arguments of vLLM's `OpenAIServingChat`: `enable_auto_tools`, `tool_parser` and `reasoning_parser`. null "
            "or left out: calls of tools and reasoning stay in the text."
        ),
    ] = None


@section
class ColocatedResourcesConfig:
    """`policy.generation.colocated.resources`: the devices of engines that do not share the trainer's."""

    gpus_per_node: Annotated[
        int | None,
        doc(
            "GPUs (on CPU: workers) on each node for generation, beside those of `cluster`; null when colocated.", ge=1
        ),
    ]
    num_nodes: Annotated[int | None, doc("Nodes for generation; null when colocated.", ge=1)]


@section
class ColocatedConfig:
    """`policy.generation.colocated`: whether engine and trainer share devices."""

    enabled: Annotated[
        bool,
        doc("Engine and trainer share the same devices in turn. false: each has its own, and nothing is offloaded."),
    ]
    resources: Annotated[ColocatedResourcesConfig, doc("Devices of the engines otherwise.")]


@section
class GenerationConfig:
    """`policy.generation`: how responses are sampled, and by which engine."""

    backend: Annotated[Literal["vllm"], doc("The inference engine.")]
    max_new_tokens: Annotated[
        int,
        doc("Longest response, in tokens; after a long prompt `vllm_cfg.max_model_len` ends it earlier.", ge=1),
    ]
    temperature: Annotated[float, doc("Sampling temperature of rollouts; 0 is greedy.", ge=0)]
    top_p: Annotated[
        float,
        doc(
            "Nucleus sampling: share of the probability mass that is kept. Logprobs of engine and policy are over the "
            "tokens that `top_k` and it leave, as in NeMo-RL; those of the reference and its KL over all.",
            gt=0,
            le=1,
        ),
    ]
    top_k: Annotated[
        int | None,
        doc("Sample from this number of most likely tokens; null for all. Logprobs: see `top_p`.", ge=1),
    ]
    val_temperature: Annotated[float, doc("`temperature` of validation.", ge=0)]
    val_top_p: Annotated[float, doc("`top_p` of validation.", gt=0, le=1)]
    val_top_k: Annotated[int | None, doc("`top_k` of validation.", ge=1)]
    stop_token_ids: Annotated[
        tuple[int, ...] | None, doc("Token ids that end a response beside the tokenizer's end of sequence.")
    ]
    stop_strings: Annotated[tuple[str, ...] | None, doc("Texts that end a response.")]
    vllm_cfg: Annotated[VllmConfig, doc("The vLLM engine.")]
    vllm_kwargs: Annotated[
        dict[str, Any],
        doc(
            "Further arguments of `vllm.LLM` that change how fast it computes or what it reports. Arguments "
            "that change the model, its placement or the sampling are refused with the reason."
        ),
    ]
    colocated: Annotated[ColocatedConfig, doc("Where the engines run.")]

    @property
    def sampling(self) -> SamplingSettings:
        """Of rollouts."""
        return self._sampling(self.temperature, self.top_p, self.top_k)

    @property
    def val_sampling(self) -> SamplingSettings:
        """Of validation."""
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
