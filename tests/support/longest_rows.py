"""Whether vLLM starts for the longest rows, and for one token more, of each form of rotary embeddings.

`python longest_rows.py FOLDER VERDICTS`: model folders are written to FOLDER, and a JSON file with what was found to
VERDICTS: libraries may log to the standard output. Needs vLLM's environment variables.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from model_families import family_config
from vllm.config import ModelConfig

from nemo_offload_rl.models.served import longest_served

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 300},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


def starts(folder: Path, num_tokens: int) -> bool:
    try:
        ModelConfig(model=str(folder), max_model_len=num_tokens, skip_tokenizer_init=True)
    except ValueError as error:
        if "max_model_len" not in str(error):
            raise
        return False
    return True


def main() -> None:
    folders, verdicts = map(Path, sys.argv[1:])
    found: dict[str, list[float | bool]] = {}
    for kind, rope in ROPES.items():
        parameters = {"rope_type": kind, "rope_theta": 1e4, **rope}
        family_config("llama", rope_parameters=parameters, max_position_embeddings=1024).save_pretrained(folders / kind)
    for folder in sorted(folders.iterdir()):
        longest = longest_served(json.loads((folder / "config.json").read_text()))
        assert longest is not None
        found[folder.name] = [longest, starts(folder, int(longest)), starts(folder, int(longest) + 1)]
    verdicts.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
