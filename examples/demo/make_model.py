"""Makes the demo's model and tokenizer: a small Qwen3 with random weights that reads and writes single characters.

Usage: python examples/demo/make_model.py --output runs/demo/model [--seed 42]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, END = "<pad>", "<end>"
SPECIAL = [PAD, END, "<user>", "<assistant>"]
CHARACTERS = "0123456789+-*=, "
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCAB_SIZE = 64  # a round number for the matrix product; the ids above the characters are never trained


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, and four for padding, the end, and the two speakers."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=64,
    )


# Three layers of width 128, 0.6 million parameters.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def make_model(seed: int, sizes: Mapping[str, int] = SIZES) -> Qwen3ForCausalLM:
    """A model in float32, drawn from `seed`; `sizes` are keys of its configuration."""
    config = Qwen3Config(
        **dict[str, Any](sizes),
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=SPECIAL.index(PAD),
        eos_token_id=SPECIAL.index(END),
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def write_model_folder(path: Path, seed: int, sizes: Mapping[str, int] = SIZES) -> None:
    """Write weights, configuration and tokenizer, as Hugging Face and vLLM load them."""
    make_model(seed, sizes).save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights")
    arguments = parser.parse_args()
    write_model_folder(arguments.output, arguments.seed)
    print(f"wrote {arguments.output}; its tokenizer knows the characters {CHARACTERS!r} and drops all others")


if __name__ == "__main__":
    main()
