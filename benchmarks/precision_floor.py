"""How far logprobs in bfloat16 are from those in float32, of one model with random weights, computed by Hugging Face.

    python benchmarks/precision_floor.py --shapes 4B qwen3.5-4B nemotron-h-8B qwen3.5-12-layers --json floor.json
    python benchmarks/precision_floor.py --shapes 0.6B qwen3.5-4B --hidden 1024 --layers 24 --vocab 32000 --device cpu

GRPO's `token_mult_prob_error` is the mean of exp(|difference|) of two logprobs of a sampled token: the engine's and the
policy's, both in bfloat16. Two right implementations differ by about as much as each differs from float32, which is
what is printed: a model whose own figure is 1.02 cannot give less in a run. Weights are rounded to bfloat16 in both.
Sizes can be cut with options.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import measured_with, write_result
from hybrid_shapes import HYBRID_SHAPES, widen_routers
from qwen3_shapes import TIED, hf_config, shape_of


def config_of(name: str, args: argparse.Namespace) -> Any:
    """Configuration of a shape, cut to the sizes of the options."""
    from transformers import AutoConfig

    settings = dict(HYBRID_SHAPES[name]) if name in HYBRID_SHAPES else hf_config(shape_of(name), name in TIED)
    settings |= {"dtype": "float32", "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
    if args.hidden:
        settings |= {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
        settings |= heads | {key: heads_of for key, heads_of in LINEAR_HEADS.items() if key in settings}
    settings |= {"num_hidden_layers": args.layers} if args.layers else {}
    settings |= {"vocab_size": args.vocab} if args.vocab else {}
    return AutoConfig.for_model(**settings)


LINEAR_HEADS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}


@torch.no_grad()
def measure(config: Any, args: argparse.Namespace) -> dict[str, float]:
    """Mean of exp(|logprob in bfloat16 - logprob in float32|) over sampled tokens, and the spread of the logits."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        tokens_BS = torch.randint(0, config.vocab_size, (args.rows, args.tokens))
    widen_routers(model)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    logits_BSV = model(tokens_BS).logits[:, :-1]
    logprobs_BSV = logits_BSV.log_softmax(-1)
    sampled_BS1 = torch.distributions.Categorical(logits=logprobs_BSV).sample()[..., None]
    in_float32 = logprobs_BSV.gather(-1, sampled_BS1)
    in_bfloat16 = model.bfloat16()(tokens_BS).logits[:, :-1].float().log_softmax(-1).gather(-1, sampled_BS1)
    error = (in_bfloat16 - in_float32).abs().exp().mean().item()
    return {"mean_exp_difference": error, "logits_std": logits_BSV.std().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", required=True)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {**measured_with(), "shapes": {}}
    for name in args.shapes:
        found = result["shapes"][name] = measure(config_of(name, args), args)
        print(f"{name:24}", *(f"{key} {value:.4f} " for key, value in found.items()), flush=True)
        write_result(args.json, result)


if __name__ == "__main__":
    main()
