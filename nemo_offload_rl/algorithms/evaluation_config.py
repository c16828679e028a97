"""The YAML keys `eval.*` and `generation.*` of an evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from nemo_offload_rl.generation.config import VllmConfig
from nemo_offload_rl.generation.interfaces import SamplingSettings
from nemo_offload_rl.schema import doc, section


@section
class EvalSectionConfig:
    """`eval`: what is measured."""

    metric: Annotated[
        Literal["pass@k", "cons@k"],
        doc(
            "pass@k: the chance that one of k responses is right, estimated without bias. cons@k: beside it the chance "
            "that the answer most of k responses agree on is right; the environment has to say what it read as answer."
        ),
    ]
    num_tests_per_prompt: Annotated[int, doc("Responses to each prompt.", ge=1)]
    k_value: Annotated[
        int, doc("The k of the score; powers of two up to num_tests_per_prompt are told beside it.", ge=1)
    ]
    greedy: Annotated[
        bool, doc("Also one greedy response to each prompt, for `accuracy_greedy`, where the others are sampled.")
    ]
    max_samples: Annotated[int | None, doc("Prompts, the first of each data set in turn; null for all.", ge=1)]
    seed: Annotated[int, doc("Seed of the sampling.", ge=0)]
    save_path: Annotated[
        str | None,
        doc("Folder for results.json, responses.jsonl and the page index.html, written over; null writes nothing."),
    ]


@section
class EvalGenerationConfig:
    """`generation`: the model, and how it responds."""

    backend: Annotated[Literal["vllm"], doc("The inference engine.")]
    model_name: Annotated[
        str,
        doc(
            "Model folder, name on the hub, or checkpoint of a run: `step_<n>` with `hf/` in it, or a folder of such, "
            "of which the newest is taken.",
            min_length=1,
        ),
    ]
    hf_config_overrides: Annotated[dict[str, Any], doc("Values over those of the model's config.json.")]
    max_new_tokens: Annotated[int, doc("Longest response, in tokens.", ge=1)]
    temperature: Annotated[float, doc("Sampling temperature; 0 is greedy, for one response to each prompt.", ge=0)]
    top_p: Annotated[float, doc("Nucleus sampling: share of the probability mass that is kept.", gt=0, le=1)]
    top_k: Annotated[int | None, doc("Sample from this number of most likely tokens; null for all.", ge=1)]
    stop_token_ids: Annotated[
        tuple[int, ...] | None, doc("Token ids that end a response beside the tokenizer's end of sequence.")
    ]
    stop_strings: Annotated[tuple[str, ...] | None, doc("Texts that end a response.")]
    num_prompts_per_step: Annotated[
        int | None, doc("Prompts that are asked and scored at a time; null for all at once.", ge=1)
    ]
    vllm_cfg: Annotated[VllmConfig, doc("The vLLM engine.")]
    vllm_kwargs: Annotated[dict[str, Any], doc("Further arguments of `vllm.LLM`, as in `policy.generation`.")]

    def sampling(self, *, greedy: bool) -> SamplingSettings:
        """As the keys say, or greedy."""
        return SamplingSettings(
            max_new_tokens=self.max_new_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            top_k=None if greedy else self.top_k,
            stop_token_ids=self.stop_token_ids or (),
            stop_strings=self.stop_strings or (),
        )
