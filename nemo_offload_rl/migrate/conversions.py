"""Keys that mean another thing here under the same name, or depend on others, with the function that takes them over.

The guide for users of NeMo-RL has the same table, and a test compares the two.
"""

from __future__ import annotations

from nemo_offload_rl.migrate.ahead import AHEAD
from nemo_offload_rl.migrate.algorithm import ALGORITHM
from nemo_offload_rl.migrate.conversion import Conversion
from nemo_offload_rl.migrate.data_sets import convert_data
from nemo_offload_rl.migrate.evaluation import EVALUATION
from nemo_offload_rl.migrate.placement import PLACEMENT
from nemo_offload_rl.migrate.policy import POLICY
from nemo_offload_rl.migrate.teacher import TEACHER

CONVERSIONS: tuple[Conversion, ...] = (
    *AHEAD,
    *ALGORITHM,
    *POLICY,
    *PLACEMENT,
    TEACHER,
    *EVALUATION,
    Conversion(
        (
            "data.train",
            "data.train.*",
            "data.validation",
            "data.validation.*",
            "data.default",
            "data.default.*",
            "data.max_input_seq_length",
            "data.add_bos",
            "env.*",
        ),
        "a prompt or conversation of `max_input_seq_length` tokens is too long already, and masked (in DPO a longer "
        "one); `data_path`, `openai_format`",
        "`max_input_seq_length` is one less; what is longer is masked; `path`, `OpenAIFormatDataset`",
        convert_data,
    ),
)
