"""Files of evaluations, whose sections lie elsewhere than those of a run: `generation` and `tokenizer` at the top."""

from __future__ import annotations

from nemo_offload_rl.migrate.algorithm import PASS_THROUGH
from nemo_offload_rl.migrate.conversion import Conversion
from nemo_offload_rl.migrate.data_sets import found_file
from nemo_offload_rl.migrate.draft import Draft, leaves

# Those that NeMo-RL's evaluation reads as its runs do; its others have forms of their own.
_DATA_SETS = ("AIME2024", "AIME2025", "AIME2026")
_DEFAULT = {"prompt_file": None, "system_prompt_file": None, "processor": "math_hf_data_processor", "env_name": "math"}


def _sampling(draft: Draft) -> None:
    for key in ("generation.top_k", "generation.num_prompts_per_step"):
        if draft.get(key) == -1:
            draft.convert(key, key, None, "null is all")
        else:
            draft.keep(key, key, draft.get(key))
    for path, _ in leaves(draft.section("generation"), "generation"):
        if path.startswith(("generation.val_", "generation.colocated")):
            draft.ignore(path, "an evaluation has no rollouts of training beside it")
    template = "tokenizer.chat_template"
    if draft.has(template) and draft.get(template) is None:
        draft.convert(template, template, PASS_THROUGH, "null is messages put one after the other there")
    else:
        draft.keep(template, template, draft.get(template))


def _data(draft: Draft) -> None:
    name = draft.get("data.dataset_name")
    data_set = {"dataset_name": name}
    if name in _DATA_SETS:
        draft.rename("data.dataset_name", "data.validation.dataset_name", name, "")
        draft.fill("data.validation.repeat", draft.get("data.repeat", 1), "as data.repeat has it")
        data_set["repeat"] = draft.get("data.repeat", 1)
    else:
        draft.missing("data.dataset_name", f"evaluation on {name}")
    draft.ours["data"]["validation"] = data_set
    for key, default in _DEFAULT.items():
        value = draft.get(f"data.{key}", default)
        value = found_file(draft, value) if key.endswith("_file") else value
        draft.ours["data"]["default"][key] = value
        if draft.has(f"data.{key}"):
            draft.rename(f"data.{key}", f"data.default.{key}", value, "")
        else:
            draft.fill(f"data.default.{key}", value, "the default there")
    draft.written |= {"data.validation", "data.default"}
    if draft.has("data.repeat"):
        draft.ignore("data.repeat", "is with the data set")
    limit = "data.max_input_seq_length"
    longest = draft.number("generation.vllm_cfg.max_model_len", 2048) - 1
    draft.convert(limit, limit, longest, "is not read there: whatever leaves room for a response")
    draft.fill("data.add_bos", False, "a prompt has the begin token where the chat template writes it")
    draft.fill("eval.greedy", False, "there is one kind of responses there")
    draft.fill("eval.max_samples", None, "all prompts")


def _environment(draft: Draft) -> None:
    for key in ("cluster.num_nodes", "cluster.gpus_per_node"):
        draft.keep(key, key, draft.get(key, 1))
    section = draft.section("env.math")
    draft.keep("env.math.num_workers", "env.math.num_workers", section.get("num_workers", 8))
    if section.get("verifier_type", "math") != "math":
        draft.missing("env.math.verifier_type", f"verifier {section['verifier_type']}")
    elif "verifier_type" in section:
        draft.ignore("env.math.verifier_type", "math is the one that is here")


_EVAL = ("eval",)
EVALUATION: tuple[Conversion, ...] = (
    Conversion(
        (
            "generation.top_k",
            "generation.num_prompts_per_step",
            "generation.colocated.*",
            "generation.val_temperature",
            "generation.val_top_p",
            "generation.val_top_k",
            "tokenizer.chat_template",
        ),
        "-1 is all; a null template: messages put one after the other",
        "null is all; a null template: the tokenizer's own",
        _sampling,
        _EVAL,
    ),
    Conversion(
        (
            "data.dataset_name",
            "data.repeat",
            "data.prompt_file",
            "data.system_prompt_file",
            "data.processor",
            "data.env_name",
        ),
        "one data set, with its keys in `data` itself",
        "`data.validation` and `data.default`; AIME only, other data sets of an evaluation are refused",
        _data,
        _EVAL,
        ("data.max_input_seq_length",),
    ),
    Conversion(
        ("env.math.num_workers", "env.math.verifier_type"),
        "several verifiers",
        "that of mathematics",
        _environment,
        _EVAL,
        ("cluster.num_nodes", "cluster.gpus_per_node"),
    ),
)
