"""The YAML keys of published data sets that have a name here, which is NeMo-RL's if NeMo-RL has the data set."""

from typing import Annotated, Literal

from nemo_offload_rl.keys.data_source import HeldOutKeys, TaskKeys
from nemo_offload_rl.keys.section import doc, section


@section
class PublishedKeys(HeldOutKeys, TaskKeys):
    """Keys of all data sets that have a name."""

    path: Annotated[
        str | None,
        doc(
            "File or folder with the columns of the published data set, or another name on the hub. null: the "
            "published data set, from the hub or its local cache."
        ),
    ] = None


@section
class OpenMathInstruct2Config(PublishedKeys):
    """`dataset_name: OpenMathInstruct-2`: nvidia/OpenMathInstruct-2 (arXiv 2410.01560)."""

    dataset_name: Annotated[Literal["OpenMathInstruct-2"], doc("Selects this data set.")]
    split: (
        Annotated[Literal["train", "train_1M", "train_2M", "train_5M"], doc("Split to use; if omitted: train_1M.")]
        | None
    ) = None
    output_key: Annotated[
        Literal["expected_answer", "generated_solution"],
        doc("Field with the answer; `generated_solution` is for SFT on solutions."),
    ] = "expected_answer"


@section
class MathProblemsConfig(PublishedKeys):
    """Problems with short answers, in one split.

    BytedTsinghua-SIA/DAPO-Math-17k and BytedTsinghua-SIA/AIME-2024 (each problem many times, with DAPO's instructions),
    agentica-org/DeepScaleR-Preview-Dataset, HuggingFaceH4/aime_2024, opencompass/AIME2025 (both parts),
    MathArena/aime_2026, HuggingFaceH4/MATH-500.
    """

    dataset_name: Annotated[
        Literal["DAPOMath17K", "DAPOMathAIME2024", "DeepScaler", "AIME2024", "AIME2025", "AIME2026", "MATH-500"],
        doc("Selects this data set."),
    ]
    repeat: Annotated[int, doc("Number of copies of all rows, one after the other.", ge=1)] = 1


@section
class Gsm8kConfig(PublishedKeys):
    """`dataset_name: gsm8k` or `GSM8K`: openai/gsm8k."""

    dataset_name: Annotated[Literal["gsm8k", "GSM8K"], doc("Selects this data set.")]
    subset: Annotated[Literal["main", "socratic"], doc("Subset to use; if omitted: main.")] | None = None
    split: Annotated[Literal["train", "test"], doc("Split to use; if omitted: train.")] | None = None
    extract_answer: Annotated[bool, doc("The answer is only what follows `####`; with false, the whole solution.")] = (
        True
    )


@section
class MathConfig(PublishedKeys):
    """`dataset_name: MATH`: all seven parts of EleutherAI/hendrycks_math (arXiv 2103.03874)."""

    dataset_name: Annotated[Literal["MATH"], doc("Selects this data set.")]
    split: Annotated[Literal["train", "test"], doc("Split to use; if omitted: train.")] | None = None
    extract_answer: Annotated[
        bool, doc("The answer is only the last boxed formula; with false, the whole solution.")
    ] = True


@section
class SquadConfig(PublishedKeys):
    """`dataset_name: squad`: rajpurkar/squad; the passage is the system message, the first answer the assistant's."""

    dataset_name: Annotated[Literal["squad"], doc("Selects this data set.")]
    split: Annotated[Literal["train", "validation"], doc("Split to use; if omitted: train.")] | None = None


@section
class ConversationsConfig(PublishedKeys):
    """Conversations: allenai/tulu-3-sft-mixture; the math part of nvidia/Nemotron-Cascade-2-SFT-Data."""

    dataset_name: Annotated[Literal["tulu3_sft_mixture", "Nemotron-Cascade-2-SFT-Math"], doc("Selects this data set.")]
    max_samples: Annotated[int | None, doc("Number of conversations to draw with `seed`; null for all.", ge=1)] = None


@section
class PublishedPairsConfig(PublishedKeys):
    """Pairs of responses. Pairs in which neither is better are dropped, and counted in the log.

    nvidia/HelpSteer3 (its preferences), allenai/llama-3.1-tulu-3-8b-preference-mixture,
    HuggingFaceH4/ultrafeedback_binarized.
    """

    dataset_name: Annotated[Literal["HelpSteer3", "Tulu3Preference", "UltraFeedback"], doc("Selects this data set.")]
    split: Annotated[
        str | None,
        doc(
            "Split to use: train or validation of HelpSteer3, train_prefs or test_prefs of UltraFeedback; if "
            "omitted: the first."
        ),
    ] = None


type PublishedQuestions = OpenMathInstruct2Config | MathProblemsConfig | Gsm8kConfig | MathConfig
type PublishedConversations = SquadConfig | ConversationsConfig
