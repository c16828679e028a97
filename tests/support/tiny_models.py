"""Tiny models and a tokenizer, made in code: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 384
PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: one token for each byte, then two special tokens; ids 258..383 decode to `<n>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    vocab |= {PAD_TOKEN: 256, EOS_TOKEN: 257}
    vocab |= {f"<{index}>": index for index in range(258, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN)
    fast.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}\n{% endif %}"
    )
    return fast


def qwen3_config(*, tied: bool = False, num_layers: int = 2, hidden_size: int = 64) -> Qwen3Config:
    """Grouped-query attention 4/2 with heads of 32, the smallest that vLLM's CPU attention takes."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        pad_token_id=256,
        eos_token_id=257,
        bos_token_id=None,
        initializer_range=0.3,  # wide logits, so that greedy choices have clear margins
        dtype="float32",
    )


def make_qwen3(seed: int, config: Qwen3Config | None = None) -> Qwen3ForCausalLM:
    """A float32 model with weights drawn from `seed`, in eval mode; the global RNG is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config or qwen3_config())
        # All norms start as one; other values show whether they were loaded.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model.float().eval()


def save_model_folder(path: Path, seed: int, config: Qwen3Config | None = None) -> Qwen3ForCausalLM:
    """Write weights, config and tokenizer to `path`, as Hugging Face and vLLM read them."""
    model = make_qwen3(seed, config)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return model
