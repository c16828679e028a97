"""The YAML keys `data.*`, `env.*` and `policy.tokenizer.*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_offload_rl.data.published_config import (
    ConversationsConfig,
    Gsm8kConfig,
    MathConfig,
    MathProblemsConfig,
    OpenMathInstruct2Config,
    PublishedPairsConfig,
    SquadConfig,
)
from nemo_offload_rl.data.source_keys import FileKeys, TaskKeys, ToolKeys
from nemo_offload_rl.schema import doc, section


@section
class ArithmeticConfig(TaskKeys):
    """`dataset_name: arithmetic`: made-up problems such as `37+48=`, with exact answers; nothing is downloaded."""

    dataset_name: Annotated[Literal["arithmetic"], doc("This data set.")]
    num_digits: Annotated[int, doc("Digits of each operand, at most.", ge=1, le=9)]
    operators: Annotated[tuple[Literal["+", "-", "*"], ...], doc("Operators to draw from.", min_length=1)]
    size: Annotated[int, doc("Training problems, all different.", ge=1)]
    holdout: Annotated[
        int, doc("Further problems for validation, none of which training sees, whatever its seed.", ge=0)
    ]
    seed: Annotated[int, doc("Seed that picks the problems.", ge=0)]


@section
class ResponseDatasetConfig(FileKeys, ToolKeys, TaskKeys):
    """`dataset_name: ResponseDataset`: a prompt and its answer or completion in each row."""

    dataset_name: Annotated[Literal["ResponseDataset"], doc("This data set.")]
    input_key: Annotated[
        str, doc("Field of a row that holds the prompt; `a.b.0` is a field inside of others, 0 the first of a list.")
    ]
    output_key: Annotated[str, doc("Field of a row that holds the answer, likewise.")]


@section
class OpenAIFormatConfig(FileKeys, ToolKeys, TaskKeys):
    """`dataset_name: OpenAIFormatDataset`: a conversation in each row, a list of `role` and `content`."""

    dataset_name: Annotated[Literal["OpenAIFormatDataset"], doc("This data set.")]
    chat_key: Annotated[str, doc("Field of a row that holds the messages, as `messages`.")]


@section
class BinaryPreferenceConfig(FileKeys, ToolKeys, TaskKeys):
    """`dataset_name: BinaryPreferenceDataset`: a better and a worse response in each row, as text or messages."""

    dataset_name: Annotated[Literal["BinaryPreferenceDataset"], doc("This data set.")]
    prompt_key: Annotated[
        str | None,
        doc("Field that holds the prompt, text or messages; null where both responses are whole conversations."),
    ]
    chosen_key: Annotated[str, doc("Field that holds the better response.")]
    rejected_key: Annotated[str, doc("Field that holds the worse response.")]


@section
class PreferenceConfig(FileKeys, ToolKeys, TaskKeys):
    """`dataset_name: PreferenceDataset`: rows with `context` messages and `completions`, each with its `rank`.

    The completion of the lowest rank is the better one, that of the highest the worse one.
    """

    dataset_name: Annotated[Literal["PreferenceDataset"], doc("This data set.")]


Questions = (
    ArithmeticConfig | ResponseDatasetConfig | OpenMathInstruct2Config | MathProblemsConfig | Gsm8kConfig | MathConfig
)
Conversations = OpenAIFormatConfig | SquadConfig | ConversationsConfig
Pairs = BinaryPreferenceConfig | PreferenceConfig | PublishedPairsConfig
DataSource = Questions | Conversations | Pairs

GrpoSource = Annotated[Questions, Field(discriminator="dataset_name")]
SftSource = Annotated[Questions | Conversations, Field(discriminator="dataset_name")]
DpoSource = Annotated[Pairs, Field(discriminator="dataset_name")]


@section
class MixtureKeys:
    """Several data sets in fixed proportions."""

    dataset_name: Annotated[Literal["mixture"], doc("This data set.")]
    weights: Annotated[
        tuple[Annotated[float, Field(gt=0)], ...] | None,
        doc(
            "Share of each data set in the rows, in proportion to the others. Small data sets are repeated more often. "
            "null: by their sizes, every row once in an epoch."
        ),
    ]


@section
class GrpoMixtureConfig(MixtureKeys):
    """`dataset_name: mixture`: several data sets in fixed proportions."""

    datasets: Annotated[tuple[GrpoSource, ...], doc("The data sets, each with keys as `data.train` has them.")]


@section
class SftMixtureConfig(MixtureKeys):
    """`dataset_name: mixture`: several data sets in fixed proportions."""

    datasets: Annotated[tuple[SftSource, ...], doc("The data sets, each with keys as `data.train` has them.")]


@section
class DpoMixtureConfig(MixtureKeys):
    """`dataset_name: mixture`: several data sets in fixed proportions."""

    datasets: Annotated[tuple[DpoSource, ...], doc("The data sets, each with keys as `data.train` has them.")]


DatasetConfig = Annotated[Questions | GrpoMixtureConfig, Field(discriminator="dataset_name")]
SftDatasetConfig = Annotated[Questions | Conversations | SftMixtureConfig, Field(discriminator="dataset_name")]
DpoDatasetConfig = Annotated[Pairs | DpoMixtureConfig, Field(discriminator="dataset_name")]

type MixtureConfig = GrpoMixtureConfig | SftMixtureConfig | DpoMixtureConfig


@section
class DataDefaultConfig:
    """`data.default`: how rows become prompts, unless a data set says otherwise."""

    prompt_file: Annotated[
        str | None,
        doc(
            "Text file with `{}` where the problem goes, and `{{` `}}` for literal braces; null sends the problem "
            "alone."
        ),
    ]
    system_prompt_file: Annotated[str | None, doc("Text file of the system message; null for none.")]
    processor: Annotated[
        str, doc("Function that turns a row into messages, by name, or one of your own: `path/to/file.py:name`.")
    ]
    env_name: Annotated[str, doc("Environment that scores the responses: a key of `env`.")]


@section
class DataConfig:
    """`data`: prompts for training and validation."""

    max_input_seq_length: Annotated[
        int,
        doc(
            "Longest prompt, chat template included, in tokens; its response has the rest of "
            "`policy.generation.vllm_cfg.max_model_len` at most.",
            ge=1,
        ),
    ]
    overlong_rows: Annotated[
        Literal["mask", "drop", "error"],
        doc(
            "What happens to a longer prompt: `mask` keeps its place, cut to a few tokens, and trains on no "
            "response to it, as NeMo-RL does; `drop` leaves it out; both are counted in `data/overlong_rows`. `error` "
            "names the row and ends the run."
        ),
    ]
    add_bos: Annotated[bool, doc("Begin with the tokenizer's begin token, where it has one and the template has not.")]
    shuffle: Annotated[bool, doc("Shuffle the training prompts in each epoch.")]
    train: Annotated[DatasetConfig, doc("Training prompts; `dataset_name` determines which keys follow.")]
    validation: Annotated[
        DatasetConfig | None,
        doc(
            "Validation prompts, with the keys of `data.train`, used whole, beside the part that `train` keeps for "
            "validation; null for that part alone."
        ),
    ]
    default: Annotated[DataDefaultConfig, doc("How rows become prompts.")]


@section
class EvalDataConfig:
    """`data` of an evaluation: the prompts."""

    max_input_seq_length: Annotated[int, doc("Longest prompt, chat template included, in tokens.", ge=1)]
    overlong_rows: Annotated[
        Literal["drop", "error"],
        doc("What happens to a longer prompt: `drop` leaves it out and logs how many there are, `error` ends the run."),
    ]
    add_bos: Annotated[bool, doc("Begin with the tokenizer's begin token, where it has one and the template has not.")]
    validation: Annotated[
        DatasetConfig,
        doc("All rows of this data set; of `arithmetic` the held-out ones. Keys as `data.train` of GRPO."),
    ]
    default: Annotated[DataDefaultConfig, doc("How rows become prompts.")]


@section
class SftDefaultConfig:
    """`data.default`: how rows become conversations, unless a data set says otherwise."""

    prompt_file: Annotated[
        str | None, doc("Text file with `{}` where the prompt of a row goes; null sends the prompt alone.")
    ]
    system_prompt_file: Annotated[
        str | None, doc("Text file of the system message, for conversations that have none; null for none.")
    ]
    processor: Annotated[
        str, doc("Function that turns a row with a prompt into messages, by name, or your own: `path/to/file.py:name`.")
    ]


@section
class DpoDefaultConfig:
    """`data.default`: how rows become pairs, unless a data set says otherwise."""

    system_prompt_file: Annotated[
        str | None, doc("Text file of the system message, for prompts that have none; null for none.")
    ]


@section
class SupervisedDataKeys:
    """What the data of SFT and of DPO have in common."""

    max_input_seq_length: Annotated[int, doc("Longest sequence, prompt and response together, in tokens.", ge=2)]
    overlong_rows: Annotated[
        Literal["error", "drop", "mask"],
        doc(
            "What happens to a longer sequence: `error` names the row and ends the run; `drop` leaves it out; `mask` "
            "keeps its place, cut to a few tokens, without a share in the loss, as NeMo-RL does. Both are counted in "
            "`data/overlong_rows`."
        ),
    ]
    add_bos: Annotated[bool, doc("Begin with the tokenizer's begin token, where it has one and the template has not.")]
    add_eos: Annotated[bool, doc("End with the end-of-sequence token where the chat template does not.")]
    loss_span: Annotated[
        Literal["response", "response_and_end", "message"],
        doc(
            "What of each turn of the assistant the loss counts: `response` is what it wrote, with its end token; "
            "`response_and_end` also the white space that the chat template writes after that; `message` also what it "
            "writes before a response, such as the speaker's name, as NeMo-RL does without `add_generation_prompt`."
        ),
    ]
    shuffle: Annotated[bool, doc("Shuffle the training data in each epoch.")]


@section
class SftDataConfig(SupervisedDataKeys):
    """`data`: conversations for training and validation."""

    train: Annotated[SftDatasetConfig, doc("Training data; `dataset_name` determines which keys follow.")]
    validation: Annotated[
        SftDatasetConfig | None,
        doc(
            "Validation data, with the keys of `data.train`, used whole, beside the part that `train` keeps for "
            "validation; null for that part alone."
        ),
    ]
    default: Annotated[SftDefaultConfig, doc("How rows become conversations.")]


@section
class DpoDataConfig(SupervisedDataKeys):
    """`data`: pairs of responses for training and validation."""

    train: Annotated[DpoDatasetConfig, doc("Training data; `dataset_name` determines which keys follow.")]
    validation: Annotated[
        DpoDatasetConfig | None,
        doc(
            "Validation data, with the keys of `data.train`, used whole, beside the part that `train` keeps for "
            "validation; null for that part alone."
        ),
    ]
    default: Annotated[DpoDefaultConfig, doc("How rows become pairs.")]


BUILT_IN = ("arithmetic", "math")
"""Environments of this package, by their names in `env`."""


@section
class EnvConfig:
    """`env.NAME`: one environment: `arithmetic`, `math`, or with `target` one of your own under any name."""

    num_workers: Annotated[int, doc("Processes that score responses; 0 scores in the driver.", ge=0)]
    retry_message: Annotated[
        str | None,
        doc(
            "Message to the policy after a wrong answer, where `grpo.max_rollout_turns` allows another turn; "
            "null or absent: a rollout has one turn."
        ),
    ] = None
    target: Annotated[
        str | tuple[str, ...] | None,
        doc(
            "Code of your own (docs/guides/your-own-reward.md): `package.module.Name` or `path/to/file.py:name` of a "
            "reward function, a list of such functions, or the class of an environment or of an agent "
            "(docs/guides/agents.md). null or absent: NAME is built in."
        ),
    ] = None
    weights: Annotated[
        tuple[float, ...] | None,
        doc("Factors of the rewards of a list of functions, whose sum is the reward; null or absent: 1 each."),
    ] = None
    kwargs: Annotated[
        dict[str, Any] | None, doc("Further arguments of the function, or those of the class; null or absent: none.")
    ] = None
    timeout_s: Annotated[
        float | None,
        doc(
            "Seconds in which a worker process scores a response, or an agent does a whole rollout; one that takes "
            "longer has reward 0. null or left out: 5, of agents 600.",
            gt=0,
        ),
    ] = None
    math_verify_impl: Annotated[
        Literal["hf_math_verify", "dapo_math_verify"],
        doc(
            "Of `math`: `hf_math_verify` compares answers as mathematics; `dapo_math_verify` compares the text after "
            "the last `Answer:`, which the prompts of DAPOMath17K ask for. Left out: hf_math_verify."
        ),
    ] = "hf_math_verify"


@section
class TokenizerConfig:
    """`policy.tokenizer`."""

    name: Annotated[str, doc("Folder or hub name of the tokenizer.", min_length=1)]
    chat_template: Annotated[
        str | None,
        doc(
            "Jinja chat template, or the path of a `.jinja` file that holds one; null or `default` for the tokenizer's "
            "own. NeMo-RL's null, messages put one after the other, is a template of its own here."
        ),
    ]
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("Arguments of the chat template.")]
