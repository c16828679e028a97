"""The YAML keys `data.*` and `env.*`."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import Field

from nemo_offload_rl.schema import closed, doc


class TaskKeys(TypedDict):
    """Keys of `data.default` that a data set may set for itself."""

    prompt_file: NotRequired[Annotated[str | None, doc("As in `data.default`, for this data set.")]]
    system_prompt_file: NotRequired[Annotated[str | None, doc("As in `data.default`, for this data set.")]]
    processor: NotRequired[Annotated[str, doc("As in `data.default`, for this data set.")]]
    env_name: NotRequired[Annotated[str, doc("As in `data.default`, for this data set.")]]


@closed
class ArithmeticConfig(TaskKeys):
    """`dataset_name: arithmetic`: made-up problems such as `37+48=`, with exact answers; nothing is downloaded."""

    dataset_name: Annotated[Literal["arithmetic"], doc("This data set.")]
    num_digits: Annotated[int, doc("Digits of each operand, at most.", ge=1, le=9)]
    operators: Annotated[list[Literal["+", "-", "*"]], doc("Operators to draw from.", min_length=1)]
    size: Annotated[int, doc("Training problems, all different.", ge=1)]
    holdout: Annotated[int, doc("Further problems for validation, none of which training sees.", ge=0)]
    seed: Annotated[int, doc("Seed that picks the problems.", ge=0)]


@closed
class ResponseDatasetConfig(TaskKeys):
    """`dataset_name: ResponseDataset`: a JSONL file with a prompt and its answer on each line."""

    dataset_name: Annotated[Literal["ResponseDataset"], doc("This data set.")]
    path: Annotated[str, doc("The JSONL file.", min_length=1)]
    input_key: Annotated[str, doc("Field of a line that holds the prompt.")]
    output_key: Annotated[str, doc("Field of a line that holds the answer.")]
    split_validation_size: Annotated[float, doc("Share of the lines kept for validation.", ge=0, lt=1)]
    seed: Annotated[int, doc("Seed that picks those lines.", ge=0)]


@closed
class OpenMathInstruct2Config(TaskKeys):
    """`dataset_name: OpenMathInstruct-2`: nvidia/OpenMathInstruct-2 from the Hugging Face hub."""

    dataset_name: Annotated[Literal["OpenMathInstruct-2"], doc("This data set.")]
    split: Annotated[Literal["train", "train_1M", "train_2M", "train_5M"], doc("Split of the published data set.")]
    split_validation_size: Annotated[float, doc("Share of the rows kept for validation.", ge=0, lt=1)]
    seed: Annotated[int, doc("Seed that picks those rows.", ge=0)]


DatasetConfig = Annotated[
    ArithmeticConfig | ResponseDatasetConfig | OpenMathInstruct2Config, Field(discriminator="dataset_name")
]


@closed
class DataDefaultConfig(TypedDict):
    """`data.default`: how rows become prompts, unless a data set says otherwise."""

    prompt_file: Annotated[str | None, doc("Text file with `{}` where the problem goes; null sends the problem alone.")]
    system_prompt_file: Annotated[str | None, doc("Text file of the system message; null for none.")]
    processor: Annotated[str, doc("Function that turns a row into messages, by name.")]
    env_name: Annotated[str, doc("Environment that scores the responses: a key of `env`.")]


@closed
class DataConfig(TypedDict):
    """`data`: prompts for training and validation."""

    max_input_seq_length: Annotated[int, doc("Longest prompt, chat template included, in tokens.", ge=1)]
    shuffle: Annotated[bool, doc("Shuffle the training prompts in each epoch.")]
    train: Annotated[DatasetConfig, doc("Training prompts; `dataset_name` says which keys follow.")]
    validation: Annotated[
        DatasetConfig | None,
        doc("Validation prompts, with the keys of `data.train`; null for the part that `train` keeps for validation."),
    ]
    default: Annotated[DataDefaultConfig, doc("How rows become prompts.")]


@closed
class EnvConfig(TypedDict):
    """`env.NAME`: one environment."""

    num_workers: Annotated[int, doc("Processes that score responses; 0 scores in the driver.", ge=0)]
