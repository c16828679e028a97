"""The YAML keys `eval.*` and `generation.*` of an evaluation."""

from dataclasses import field
from typing import Annotated, Any, Literal

from nemo_offload_rl.keys.generation import SamplingSettings, VllmConfig
from nemo_offload_rl.keys.section import doc, section, value_of


@section
class EvalSectionConfig:
    """`eval`: what is measured."""

    metric: Annotated[
        Literal["pass@k", "cons@k"],
        doc(
            "pass@k: an unbiased estimate of the probability that at least one of k responses is correct. cons@k: also "
            "the probability that the most frequent answer of k responses is correct; the environment must report the "
            "answer that it found in a response. `math` counts equal answers such as 1/2 and 0.5 as one."
        ),
    ] = "pass@k"
    num_tests_per_prompt: Annotated[int, doc("Responses per prompt.", ge=1)] = 1
    k_value: Annotated[
        int, doc("The k of the metric; powers of 2 up to `num_tests_per_prompt` are reported too.", ge=1)
    ] = 1
    greedy: Annotated[bool, doc("Also generate one greedy response per prompt, for `accuracy_greedy`.")] = False
    max_samples: Annotated[
        int | None, doc("Maximum number of prompts, taken from each data set in turn; null for all.", ge=1)
    ] = None
    seed: Annotated[int, doc("Seed for sampling.", ge=0)] = 42
    save_path: Annotated[
        str | None,
        doc(
            "Folder for results.json, responses.jsonl and the page index.html. Those of a finished evaluation are "
            "overwritten; an interrupted one goes on. null writes nothing."
        ),
    ] = "runs/eval"


@section
class EvalGenerationConfig:
    """`generation`: the model, and how it responds."""

    backend: Annotated[Literal["vllm"], doc("The inference engine.")] = "vllm"
    model_name: Annotated[
        str,
        doc(
            "Model folder, hub name, or checkpoint of a run: a `step_<n>` folder with `hf/` in it, or a folder of "
            "these, whose newest is used.",
            min_length=1,
        ),
    ]
    hf_config_overrides: Annotated[dict[str, Any], doc("Values that override those of the model's config.json.")] = (
        field(default_factory=dict[str, Any])
    )
    max_new_tokens: Annotated[int, doc("Maximum response length in tokens.", ge=1)] = value_of(
        "${generation.vllm_cfg.max_model_len}"
    )
    temperature: Annotated[float, doc("Sampling temperature; 0 is greedy, for one response per prompt.", ge=0)] = 0.0
    top_p: Annotated[float, doc("Nucleus sampling: probability to keep.", gt=0, le=1)] = 1.0
    top_k: Annotated[int | None, doc("Sample from this many of the most likely tokens; null for all.", ge=1)] = None
    stop_token_ids: Annotated[
        tuple[int, ...] | None,
        doc("Token ids that end a response, in addition to the tokenizer's end-of-sequence token."),
    ] = None
    stop_strings: Annotated[tuple[str, ...] | None, doc("Strings that end a response.")] = None
    num_prompts_per_step: Annotated[
        int | None,
        doc(
            "Prompts to ask at a time; null for all at once. Each answer is scored and written when it is finished.",
            ge=1,
        ),
    ] = None
    vllm_cfg: Annotated[VllmConfig, doc("The vLLM engine.")]
    vllm_kwargs: Annotated[dict[str, Any], doc("Further arguments of `vllm.LLM`, as in `policy.generation`.")] = field(
        default_factory=dict[str, Any]
    )

    def sampling(self, *, greedy: bool) -> SamplingSettings:
        """Return how to sample: as the keys say, or greedily."""
        return SamplingSettings(
            max_new_tokens=self.max_new_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            top_k=None if greedy else self.top_k,
            stop_token_ids=self.stop_token_ids or (),
            stop_strings=self.stop_strings or (),
        )
