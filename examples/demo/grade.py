"""How many of the demos' held-out additions a model answers correctly, greedily and on the CPU.

Usage: python examples/demo/grade.py MODEL_FOLDER ... [--seed 42]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from demonstrations import problems
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

MAX_NEW_TOKENS = 16


@torch.no_grad()
def accuracy(folder: Path, seed: int) -> float:
    """Share of the held-out problems whose answer ends with the right number."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = problems(seed).validation
    texts = [
        str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row.question}], tokenize=False, add_generation_prompt=True
            )
        )
        for row in rows
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    written = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    answers = tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [answer.rpartition("=")[2] == row.answer for answer, row in zip(answers, rows, strict=True)]
    return sum(right) / len(right)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("--seed", type=int, default=42, help="seed that the problems were made with")
    arguments = parser.parse_args()
    disable_progress_bar()
    for folder in arguments.models:
        print(f"{folder}: {accuracy(folder, arguments.seed):.1%} of held-out additions right")


if __name__ == "__main__":
    main()
