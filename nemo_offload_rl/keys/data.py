"""The YAML keys `data.*`, `env.*` and `policy.tokenizer.*`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_offload_rl.keys.data_source import FileKeys, TaskKeys, ToolKeys
from nemo_offload_rl.keys.published import (
    ConversationsConfig,
    Gsm8kConfig,
    MathConfig,
    MathProblemsConfig,
    OpenMathInstruct2Config,
    PublishedPairsConfig,
    SquadConfig,
)
from nemo_offload_rl.keys.section import doc, section, value_of

BadRowsKey = Annotated[
    Literal["error", "drop"],
    doc(
        "How to treat rows that cannot be used: `error` names the first one and ends the run; `drop` leaves them out "
        "and logs their number, with file and line of the first ten. A data set without a usable row ends the run."
    ),
]


@section
class ArithmeticConfig(TaskKeys):
    """`dataset_name: arithmetic`: made-up problems such as `37+48=`, with exact answers; nothing is downloaded."""

    dataset_name: Annotated[Literal["arithmetic"], doc("Selects this data set.")]
    num_digits: Annotated[int, doc("Maximum digits of each operand.", ge=1, le=9)]
    operators: Annotated[tuple[Literal["+", "-", "*"], ...], doc("Operators to draw from.", min_length=1)]
    size: Annotated[int, doc("Training problems, all different.", ge=1)]
    holdout: Annotated[int, doc("Further problems for validation, which no seed puts in the training data.", ge=0)]
    seed: Annotated[int, doc("Seed for drawing the problems.", ge=0)]


@section
class ResponseDatasetConfig(FileKeys, ToolKeys, TaskKeys):
    """`dataset_name: ResponseDataset`: a prompt and its answer or completion in each row."""

    dataset_name: Annotated[Literal["ResponseDataset"], doc("Selects this data set.")]
    input_key: Annotated[
        str,
        doc(
            "Row field with the prompt, which is text or a list of messages. `a.b.0` is a nested field, where 0 is the "
            "first entry of a list."
        ),
    ]
    output_key: Annotated[
        str | None,
        doc(
            "Row field with the answer; may be nested in the same way. A list has several right answers. If it is the "
            "field of `input_key`, the answer is the last message there, the assistant's. null: rows have no answers."
        ),
    ]


@section
class OpenAIFormatConfig(FileKeys, ToolKeys, TaskKeys):
    """`dataset_name: OpenAIFormatDataset`: a conversation in each row, a list of `role` and `content`."""

    dataset_name: Annotated[Literal["OpenAIFormatDataset"], doc("Selects this data set.")]
    chat_key: Annotated[str, doc("Row field with the messages, such as `messages`.")]


@section
class BinaryPreferenceConfig(FileKeys, ToolKeys, TaskKeys):
    """`dataset_name: BinaryPreferenceDataset`: a better and a worse response in each row, as text or messages."""

    dataset_name: Annotated[Literal["BinaryPreferenceDataset"], doc("Selects this data set.")]
    prompt_key: Annotated[
        str | None,
        doc("Field with the prompt, as text or messages; null if both responses are complete conversations."),
    ]
    chosen_key: Annotated[str, doc("Field with the better response.")]
    rejected_key: Annotated[str, doc("Field with the worse response.")]


@section
class PreferenceConfig(FileKeys, ToolKeys, TaskKeys):
    """`dataset_name: PreferenceDataset`: rows with `context` messages and `completions`, each with its `rank`.

    The completion with the lowest rank is the better response, the one with the highest rank the worse response.
    """

    dataset_name: Annotated[Literal["PreferenceDataset"], doc("Selects this data set.")]


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

    dataset_name: Annotated[Literal["mixture"], doc("Selects this data set.")]
    weights: Annotated[
        tuple[Annotated[float, Field(gt=0)], ...] | None,
        doc(
            "Share of each data set in the rows, relative to the others; small data sets repeat more often. null takes "
            "every row once per epoch."
        ),
    ]


@section
class GrpoMixtureConfig(MixtureKeys):
    """`dataset_name: mixture`: several data sets in fixed proportions."""

    datasets: Annotated[tuple[GrpoSource, ...], doc("The data sets, each with the keys of `data.train`.")]


@section
class SftMixtureConfig(MixtureKeys):
    """`dataset_name: mixture`: several data sets in fixed proportions."""

    datasets: Annotated[tuple[SftSource, ...], doc("The data sets, each with the keys of `data.train`.")]


@section
class DpoMixtureConfig(MixtureKeys):
    """`dataset_name: mixture`: several data sets in fixed proportions."""

    datasets: Annotated[tuple[DpoSource, ...], doc("The data sets, each with the keys of `data.train`.")]


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
            "Text file with `{}` in the place of the problem, and `{{` `}}` for literal braces; null uses the problem "
            "alone."
        ),
    ] = None
    system_prompt_file: Annotated[str | None, doc("Text file with the system message; null for none.")] = None
    processor: Annotated[
        str, doc("Function that turns a row into messages: a built-in name, or your own as `path/to/file.py:name`.")
    ]
    env_name: Annotated[str, doc("Environment that scores the responses: a key of `env`.")]


@section
class DataConfig:
    """`data`: prompts for training and validation."""

    max_input_seq_length: Annotated[
        int,
        doc(
            "Maximum prompt length in tokens, chat template included. The response may take the rest of "
            "`policy.generation.vllm_cfg.max_model_len`.",
            ge=1,
        ),
    ]
    overlong_rows: Annotated[
        Literal["mask", "drop", "error"],
        doc(
            "How to treat longer prompts: `mask` cuts the prompt to a few tokens and does not train on its responses, "
            "as NeMo-RL does; `drop` removes it. Both count in `data/overlong_rows`. `error` names the row and ends "
            "the run."
        ),
    ] = "mask"
    bad_rows: BadRowsKey = "error"
    add_bos: Annotated[
        bool, doc("Prepend the tokenizer's begin-of-sequence token if it has one and the template does not add it.")
    ] = True
    shuffle: Annotated[bool, doc("Shuffle the training prompts in each epoch.")] = True
    train: Annotated[DatasetConfig, doc("Training prompts; `dataset_name` determines the other keys.")]
    validation: Annotated[
        DatasetConfig | None,
        doc(
            "Validation prompts, with the keys of `data.train`: all rows, in addition to those that `train` holds out. "
            "null uses only the latter."
        ),
    ] = None
    default: Annotated[DataDefaultConfig, doc("How rows become prompts.")]


@section
class EvalDataConfig:
    """`data` of an evaluation: the prompts."""

    max_input_seq_length: Annotated[int, doc("Maximum prompt length in tokens, chat template included.", ge=1)]
    overlong_rows: Annotated[
        Literal["drop", "error"],
        doc("How to treat longer prompts: `drop` removes them and logs their number, `error` ends the run."),
    ] = "drop"
    bad_rows: BadRowsKey = "error"
    add_bos: Annotated[
        bool, doc("Prepend the tokenizer's begin-of-sequence token if it has one and the template does not add it.")
    ] = True
    validation: Annotated[
        DatasetConfig,
        doc(
            "Data set to evaluate, with the keys of `data.train` of GRPO: all of its rows, or for `arithmetic` the "
            "held-out ones."
        ),
    ]
    default: Annotated[DataDefaultConfig, doc("How rows become prompts.")]


@section
class SftDefaultConfig:
    """`data.default`: how rows become conversations, unless a data set says otherwise."""

    prompt_file: Annotated[
        str | None, doc("Text file with `{}` in the place of a row's prompt; null uses the prompt alone.")
    ] = None
    system_prompt_file: Annotated[
        str | None, doc("Text file with the system message for conversations without one; null for none.")
    ] = None
    processor: Annotated[
        str,
        doc(
            "Function that turns a row with a prompt into messages: a built-in name, or your own as "
            "`path/to/file.py:name`."
        ),
    ]


@section
class DpoDefaultConfig:
    """`data.default`: how rows become pairs, unless a data set says otherwise."""

    system_prompt_file: Annotated[
        str | None, doc("Text file with the system message for prompts without one; null for none.")
    ] = None


@section
class SupervisedDataKeys:
    """Keys of the data of SFT and of DPO."""

    max_input_seq_length: Annotated[
        int, doc("Maximum sequence length in tokens, prompt and response together.", ge=2)
    ] = value_of("${policy.max_total_sequence_length}")
    overlong_rows: Annotated[
        Literal["error", "drop", "mask"],
        doc(
            "How to treat longer sequences: `error` names the row and ends the run; `drop` removes it; `mask` cuts it "
            "to a few tokens and excludes it from the loss, as NeMo-RL does. `drop` and `mask` count in "
            "`data/overlong_rows`."
        ),
    ] = "error"
    bad_rows: BadRowsKey = "error"
    add_bos: Annotated[
        bool, doc("Prepend the tokenizer's begin-of-sequence token if it has one and the template does not add it.")
    ] = True
    add_eos: Annotated[bool, doc("Append the end-of-sequence token if the chat template does not.")] = True
    loss_span: Annotated[
        Literal["response", "response_and_end", "message"],
        doc(
            "Part of each assistant turn that the loss counts. `response`: what the assistant wrote and its end token. "
            "`response_and_end`: also the white space that the chat template adds after it. `message`: also what the "
            "template adds before the response, such as the speaker's name; this is what NeMo-RL does without "
            "`add_generation_prompt`."
        ),
    ] = "response"
    shuffle: Annotated[bool, doc("Shuffle the training data in each epoch.")] = True


@section
class SftDataConfig(SupervisedDataKeys):
    """`data`: conversations for training and validation."""

    train: Annotated[SftDatasetConfig, doc("Training data; `dataset_name` determines the other keys.")]
    validation: Annotated[
        SftDatasetConfig | None,
        doc(
            "Validation data, with the keys of `data.train`: all rows, in addition to those that `train` holds out. "
            "null uses only the latter."
        ),
    ] = None
    default: Annotated[SftDefaultConfig, doc("How rows become conversations.")]


@section
class DpoDataConfig(SupervisedDataKeys):
    """`data`: pairs of responses for training and validation."""

    train: Annotated[DpoDatasetConfig, doc("Training data; `dataset_name` determines the other keys.")]
    validation: Annotated[
        DpoDatasetConfig | None,
        doc(
            "Validation data, with the keys of `data.train`: all rows, in addition to those that `train` holds out. "
            "null uses only the latter."
        ),
    ] = None
    default: Annotated[DpoDefaultConfig, doc("How rows become pairs.")]


BUILT_IN = ("arithmetic", "math")
"""Environments of this package, by their names in `env`."""


@section
class EnvConfig:
    """`env.NAME`: an environment. NAME is `arithmetic`, `math`, or with `target` any name."""

    num_workers: Annotated[int, doc("Number of processes that score responses; 0 scores in the driver.", ge=0)] = 8
    retry_message: Annotated[
        str | None,
        doc(
            "Message that the policy gets after a wrong answer, if `grpo.max_rollout_turns` allows another turn. null: "
            "rollouts have one turn."
        ),
    ] = None
    target: Annotated[
        str | tuple[str, ...] | None,
        doc(
            "Your own code (docs/guides/your-own-reward.md), as `package.module.Name` or `path/to/file.py:name`: a "
            "reward function of a response, or of a batch with TRL's parameters, a list of such functions, an "
            "environment class or an agent class (docs/guides/agents.md). null: NAME is built in."
        ),
    ] = None
    weights: Annotated[
        tuple[float, ...] | None,
        doc("Weights of a list of reward functions; the reward is the weighted sum of theirs. null: 1 each."),
    ] = None
    kwargs: Annotated[dict[str, Any] | None, doc("Further arguments for the function or class; null for none.")] = None
    timeout_s: Annotated[
        float | None,
        doc(
            "Time limit in seconds for scoring a response, for a call of a function of a batch, or for the whole "
            "rollout of an agent; `on_error` says what happens after it. null: 5, for functions of a batch and agents "
            "600.",
            gt=0,
        ),
    ] = None
    on_error: Annotated[
        Literal["raise", "skip", "retry"] | None,
        doc(
            "What happens if scoring a response, or an agent's rollout, fails or exceeds `timeout_s`. `raise` ends the "
            "run. `skip` excludes the rollout from loss, baselines, accuracy and pass@k, and counts it in "
            "`train/failed_rate` or `train/timed_out_rate`. `retry` tries up to two more times, then skips. null: "
            "exceptions of your reward functions and environments end the run; time limits, processes that died, "
            "failed agents and answers that `math` cannot grade are skipped."
        ),
    ] = None
    math_verify_impl: Annotated[
        Literal["hf_math_verify", "dapo_math_verify"],
        doc(
            "For `math`: `hf_math_verify` compares answers as mathematics; `dapo_math_verify` compares the text "
            "after the last `Answer:`, which the prompts of DAPOMath17K ask for."
        ),
    ] = "hf_math_verify"


@section
class TokenizerConfig:
    """`policy.tokenizer`: the tokenizer and its chat template."""

    name: Annotated[str, doc("Local folder or hub name of the tokenizer.", min_length=1)]
    chat_template: Annotated[
        str | None,
        doc(
            "Jinja chat template, or the path of a `.jinja` file; null or `default` for the tokenizer's own. In "
            "NeMo-RL null concatenates the messages; that takes a template here."
        ),
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("Arguments for the chat template.")] = None
