"""Conversions of the sections `data` and `env`, and of files for evaluations, whose data has other keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.migrate.algorithm import PASS_THROUGH
from nemo_offload_rl.migrate.draft import Draft, converts, leaves

_FILES = (".jsonl", ".json", ".parquet")
_TASK = ("prompt_file", "system_prompt_file", "processor", "env_name")
_MATH_PROCESSOR = "math_hf_data_processor"
_PROCESSORS = {"grpo": (_MATH_PROCESSOR,), "distillation": (_MATH_PROCESSOR,), "sft": ("sft_processor",), "dpo": ()}
_ENVIRONMENTS = ("math",)
_GYM = ("should_use_nemo_gym", "should_log_nemo_gym_responses")
_VERIFIERS = (None, "hf_math_verify", "dapo_math_verify")


@dataclass(frozen=True)
class _DataSet:
    """A data set of NeMo-RL that is here too.

    Attributes:
        name: Its name here.
        algorithms: Those that can read it.
        keys: Its keys, with NeMo-RL's defaults.
        share: The share of rows kept for validation by default; None if the data set does not read that key.
    """

    name: str
    algorithms: tuple[str, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    share: float | None = None


_ANSWERED = ("grpo", "distillation", "sft")
_MATH = {"split": "train_1M", "output_key": "expected_answer"}
_GSM8K = {"subset": "main", "split": "train", "extract_answer": True}
_DATA_SETS: Mapping[str, _DataSet] = {
    "OpenMathInstruct-2": _DataSet("OpenMathInstruct-2", _ANSWERED, _MATH, 0.05),
    "ResponseDataset": _DataSet("ResponseDataset", _ANSWERED, {"input_key": "input", "output_key": "output"}, 0.0),
    **{name: _DataSet(name, _ANSWERED) for name in ("DAPOMath17K", "DAPOMathAIME2024", "DeepScaler")},
    **{name: _DataSet(name, _ANSWERED, {"repeat": 1}) for name in ("AIME2024", "AIME2025", "AIME2026")},
    **{name: _DataSet(name, _ANSWERED, _GSM8K) for name in ("gsm8k", "GSM8K")},
    "squad": _DataSet("squad", ("sft",), {"split": "train"}),
    **{
        name: _DataSet(name, ("sft",), {"max_samples": None}, 0.05)
        for name in ("tulu3_sft_mixture", "Nemotron-Cascade-2-SFT-Math")
    },
    "openai_format": _DataSet("OpenAIFormatDataset", ("sft",), {"chat_key": "messages", "tool_key": "tools"}),
    "PreferenceDataset": _DataSet("PreferenceDataset", ("dpo",)),
    "BinaryPreferenceDataset": _DataSet(
        "BinaryPreferenceDataset",
        ("dpo",),
        {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"},
    ),
    "HelpSteer3": _DataSet("HelpSteer3", ("dpo",), {"split": "train"}),
    "Tulu3Preference": _DataSet("Tulu3Preference", ("dpo",)),
}
_CHANGED = {
    "dataset_name": "the name here",
    "subset": "NeMo-RL takes null as main",
    "split": "a file has one split; elsewhere NeMo-RL takes null as train",
    "split_validation_size": "this data set does not read it",
}
_NOT_READ = ("split_validation_size", "seed", "split", "subset", "repeat", "input_key", "output_key")
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "subset": (None,),
    "system_key": (None,),
    "system_prompt": (None, ""),
    "use_preserving_dataset": (True, False),
}


@converts(
    "data.train data.train.* data.validation data.validation.* data.default data.default.* data.max_input_seq_length "
    "data.add_bos env.*"
)
def _convert_data(draft: Draft) -> None:
    """Take over `data` and `env`; each key that asks for a missing feature is reported."""
    _lengths(draft)
    default = draft.section("data.default")
    if draft.samples:
        draft.fill("data.add_bos", False, "only the chat template adds the begin token")
    elif draft.has("data.add_bos"):
        draft.keep("data.add_bos")
    _default(draft, default)
    for where in ("train", "validation"):
        section = draft.get(f"data.{where}")
        if section is None:
            draft.keep(f"data.{where}", None)
        elif isinstance(section, Mapping):
            draft.ours["data"][where] = _data_set(draft, f"data.{where}", {**default, **section}, section)
        else:
            _several(draft, f"data.{where}", default, section)
        draft.written.add(f"data.{where}")
    _environments(draft, default)


def _lengths(draft: Draft) -> None:
    key = "data.max_input_seq_length"
    given = draft.number(key)
    row = "prompt" if draft.samples else "row"
    draft.fill("data.overlong_rows", "mask", f"NeMo-RL cuts a {row} that is too long, and does not train on it")
    if given is None:
        draft.missing(key, "prompts of any length (max_input_seq_length null)")
    elif draft.algorithm == "dpo":
        draft.keep(key, given)
    else:
        draft.convert(key, given - 1, "the longest allowed length; in NeMo-RL this one is too long already")


def _default(draft: Draft, default: Mapping[str, Any]) -> None:
    known = {"sft": _TASK[:3], "dpo": _TASK[1:2]}.get(draft.algorithm, _TASK)
    for name, value in default.items():
        key = f"data.default.{name}"
        if name == "processor":
            _processor(draft, key, value)
        elif name in ("prompt_file", "system_prompt_file") and name in known:
            draft.convert(key, found_file(draft, value), "searched in the file's folder and those above it")
        elif name in known:
            draft.keep(key, value)
        elif name in _TASK:
            if name == "prompt_file" and value is not None:
                draft.missing(key, "prompt_file in DPO")
            else:
                draft.ignore(key, "has no effect without rollouts")
        else:
            draft.ignore(key, "moved to the data sets")


def _processor(draft: Draft, key: str, name: Any) -> None:
    if name not in _PROCESSORS[draft.algorithm]:
        media = "images, audio and video" if str(name).startswith("vlm") else f"processor {name}"
        draft.missing(key, "NeMo-Gym" if str(name).startswith("nemo_gym") else media)
    elif draft.algorithm != "dpo":
        draft.keep(key, name)


def found_file(draft: Draft, path: Any) -> Any:
    """Find a file in the configuration's folder or one above it, never in this package."""
    if not isinstance(path, str) or Path(path).is_absolute() or draft.folder is None:
        return path
    folder = draft.folder.resolve()
    for place in (folder, *folder.parents):
        if (place / path).is_file():
            return str(place / path)
    return str(folder / path)


def _several(draft: Draft, where: str, default: Mapping[str, Any], sections: Any) -> None:
    """Convert a list of data sets, which NeMo-RL concatenates, to a mixture."""
    if not isinstance(sections, list) or not all(isinstance(section, Mapping) for section in sections):
        raise ConfigError(f"{where}: given {sections!r}, wanted a mapping or a list of some; correct it")
    pairs = enumerate(cast("list[Mapping[str, Any]]", sections))
    parts = [_data_set(draft, f"{where}.{i}", {**default, **section}, section) for i, section in pairs]
    mixture = {"dataset_name": "mixture", "weights": None, "datasets": parts}
    draft.convert(where, mixture, "a mixture that has every row once in an epoch")


def _data_set(draft: Draft, where: str, section: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one data set; `section` is `own` merged into `data.default`."""
    name = str(section.get("dataset_name", "ResponseDataset"))
    kind = _DATA_SETS.get(name)
    if kind is None or draft.algorithm not in kind.algorithms:
        for key in own:
            draft.missing(f"{where}.{key}", f"data set {name}")
        return {}
    values: dict[str, Any] = {"dataset_name": kind.name}
    for key, value in kind.keys.items():
        given = section.get(key, value)
        values[key] = value if given is None and key in ("subset", "split") else given
    if "data_path" in section:
        file = _file(section)
        # A published data set has splits and subsets of its own, which a file in its place does not change.
        values |= file if kind.name.endswith("Dataset") else {"path": file["path"]}
    values |= _held_out(draft, where, section, kind.share)
    for key, value in own.items():
        _account(draft, f"{where}.{key}", key, value, values)
    accounted = {"path" if key == "data_path" else key for key in own}
    for key in values.keys() - accounted:
        draft.fill(f"{where}.{key}", values[key], "as data.default or NeMo-RL's code sets it")
    return values


def _file(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return path, subset and split of a data set that is a file, a folder or on the hub."""
    path, subset, split = str(section["data_path"]), section.get("subset"), section.get("split")
    if path.endswith(_FILES):  # it has one split, named train in NeMo-RL
        return {"path": path, "subset": subset, "split": None}
    is_folder = Path(path).expanduser().exists()
    return {"path": path, "subset": subset, "split": split if is_folder else split or "train"}


def _held_out(draft: Draft, where: str, section: Mapping[str, Any], default: float | None) -> dict[str, Any]:
    share = 0.0 if default is None else section.get("split_validation_size", default)
    if not isinstance(share, int | float):
        raise ConfigError(f"{where}.split_validation_size: given {share!r}, wanted a number; correct it")
    if where.startswith("data.validation") and share:
        draft.missing(f"{where}.split_validation_size", "validation data that holds out rows")
    return {"split_validation_size": share, "seed": section.get("seed", 42)}


def _account(draft: Draft, path: str, key: str, value: Any, values: dict[str, Any]) -> None:
    """Report the outcome of a key that the section sets itself."""
    if path in draft.done:
        return
    if key == "data_path":
        draft.rename(path, f"{path.rpartition('.')[0]}.path", value, "")
    elif key in ("prompt_file", "system_prompt_file"):
        values[key] = found_file(draft, value)
        draft.convert(path, values[key], "searched in the file's folder and those above it")
    elif key == "env_name" and draft.samples:
        values[key] = value
        draft.keep(path, value)
    elif key == "processor":
        _processor(draft, path, value)
    elif key in values and values[key] == value:
        draft.keep(path, value)
    elif key in values:
        draft.convert(path, values[key], _CHANGED[key])
    elif key in _HARMLESS and value in _HARMLESS[key]:
        draft.ignore(path, "off")
    elif key in _NOT_READ:
        draft.ignore(path, "this data set does not read it")
    else:
        draft.missing(path)


def _environments(draft: Draft, default: Mapping[str, Any]) -> None:
    """Take over the environments that the data names; NeMo-RL starts no others."""
    if not draft.samples:
        return
    given = [draft.get(f"data.{where}") for where in ("train", "validation")]
    sections = [part for section in given for part in (section if isinstance(section, list) else [section])]
    own = [section.get("env_name", default.get("env_name")) for section in sections if isinstance(section, Mapping)]
    named = {str(name) for name in own if name is not None}
    found: dict[str, Any] = {}
    for name, section in draft.section("env").items():
        if name in _GYM:
            if section:
                draft.missing(f"env.{name}", "NeMo-Gym")
            else:
                draft.ignore(f"env.{name}", "the feature is off")
        elif name not in named:
            draft.ignore(f"env.{name}", "no data set names it")
        elif name not in _ENVIRONMENTS:
            draft.missing(f"env.{name}", f"environment {name}")
        elif not isinstance(section, Mapping):
            raise ConfigError(f"env.{name}: given {section!r}, wanted a mapping; correct it in NeMo-RL's file")
        else:
            found[name] = _environment(draft, f"env.{name}", section)
            draft.fill(f"env.{name}.retry_message", None, "the environment does not reply between turns")
    for name in sorted(name for name in named - found.keys() if f"env.{name}" not in draft.done):
        draft.missing("data.default.env_name", f"environment {name}")
    draft.ours["env"] = found
    draft.written.add("env")


def _environment(draft: Draft, where: str, section: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in section.items():
        if key == "num_workers":
            draft.keep(f"{where}.{key}", value)
        elif key == "math_verify_impl" and value in _VERIFIERS:
            draft.keep(f"{where}.{key}", value or _VERIFIERS[1])
        else:
            draft.missing(f"{where}.{key}", f"verifier {value}" if key == "math_verify_impl" else "")
    verifier = section.get("math_verify_impl") or _VERIFIERS[1]
    return {"num_workers": section.get("num_workers", 8), "retry_message": None, "math_verify_impl": verifier}


# Data sets whose rows NeMo-RL reads in the same way in evaluations and in training.
_EVALUATED = ("AIME2024", "AIME2025", "AIME2026")
_EVALUATION_DEFAULT = {
    "prompt_file": None,
    "system_prompt_file": None,
    "processor": _MATH_PROCESSOR,
    "env_name": "math",
}


@converts(
    "generation.top_k generation.num_prompts_per_step generation.colocated.* generation.val_temperature "
    "generation.val_top_p generation.val_top_k tokenizer.chat_template",
    algorithms="eval",
)
def _evaluation_sampling(draft: Draft) -> None:
    for key in ("generation.top_k", "generation.num_prompts_per_step"):
        if draft.get(key) == -1:
            draft.convert(key, None, "null is all")
        else:
            draft.keep(key)
    for path, _ in leaves(draft.section("generation"), "generation"):
        if path.startswith(("generation.val_", "generation.colocated")):
            draft.ignore(path, "has no effect in an evaluation")
    template = "tokenizer.chat_template"
    if draft.has(template) and draft.get(template) is None:
        draft.convert(template, PASS_THROUGH, "null concatenates messages there")
    else:
        draft.keep(template)


@converts(
    "data.dataset_name data.repeat data.prompt_file data.system_prompt_file data.processor data.env_name",
    algorithms="eval",
    reads="data.max_input_seq_length",
)
def _evaluation_data(draft: Draft) -> None:
    name = draft.get("data.dataset_name")
    data_set = {"dataset_name": name}
    if name in _EVALUATED:
        draft.rename("data.dataset_name", "data.validation.dataset_name", name, "")
        draft.fill("data.validation.repeat", draft.get("data.repeat", 1), "from data.repeat")
        data_set["repeat"] = draft.get("data.repeat", 1)
    else:
        draft.missing("data.dataset_name", f"evaluation on {name}")
    draft.ours["data"]["validation"] = data_set
    for key, default in _EVALUATION_DEFAULT.items():
        value = draft.get(f"data.{key}", default)
        value = found_file(draft, value) if key.endswith("_file") else value
        draft.ours["data"]["default"][key] = value
        if draft.has(f"data.{key}"):
            draft.rename(f"data.{key}", f"data.default.{key}", value, "")
        else:
            draft.fill(f"data.default.{key}", value, "the default there")
    draft.written |= {"data.validation", "data.default"}
    if draft.has("data.repeat"):
        draft.ignore("data.repeat", "moved to the data set")
    limit = "data.max_input_seq_length"
    longest = draft.number("generation.vllm_cfg.max_model_len", 2048) - 1
    draft.convert(limit, longest, "NeMo-RL does not read it: any prompt that leaves room for a response")
    draft.fill("data.add_bos", False, "only the chat template adds the begin token")
    draft.fill("eval.greedy", False, "NeMo-RL generates one kind of responses")
    draft.fill("eval.max_samples", None, "all prompts")


@converts(
    "env.math.num_workers env.math.verifier_type", algorithms="eval", reads="cluster.num_nodes cluster.gpus_per_node"
)
def _evaluation_environment(draft: Draft) -> None:
    for key in ("cluster.num_nodes", "cluster.gpus_per_node"):
        draft.keep(key, draft.get(key, 1))
    section = draft.section("env.math")
    draft.keep("env.math.num_workers", section.get("num_workers", 8))
    if section.get("verifier_type", "math") != "math":
        draft.missing("env.math.verifier_type", f"verifier {section['verifier_type']}")
    elif "verifier_type" in section:
        draft.ignore("env.math.verifier_type", "math is the only verifier here")
