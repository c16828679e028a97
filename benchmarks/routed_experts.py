"""Router replay: what it costs to have vLLM return its routing, and what the policy gains from using it.

    python benchmarks/routed_experts.py --shape 12-layers --out benchmarks/results/routed_experts.json

An engine generates with and without `enable_return_routed_experts`. Then Hugging Face's model, as the DTensor backend
runs it (bfloat16, grouped products), scores the same tokens twice: with its own routing, and with the engine's in its
place. `token_mult_prob_error` is the mean of exp(|engine's logprob - model's|) over generated tokens.

Needs a GPU; `--device cpu --shape moe-tiny --prompts 4 --tokens 16` shows that the script works. vLLM's kernels for
CPUs report no routing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "demo"))
from qwen3_shapes import MOE_SHAPES, write_model

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def generate(args: argparse.Namespace, *, returns_routing: bool) -> None:
    """Tokens, logprobs, routing and seconds of one engine, into the folder."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"enforce_eager": True, "dtype": "float32"}
    if args.device == "cuda":
        sizes = {"cudagraph_capture_sizes": [8, args.prompts]}
        options = {"gpu_memory_utilization": 0.5, "dtype": "bfloat16", "compilation_config": sizes}
    else:
        options["kv_cache_memory_bytes"] = 64 << 20
    engine = LLM(
        str(args.folder / "model"),
        max_model_len=len(PROMPT) + args.tokens,
        max_num_seqs=args.prompts,
        enable_prefix_caching=False,
        enable_return_routed_experts=returns_routing,
        seed=0,
        **options,
    )
    prompts: list[Any] = [{"prompt_token_ids": [4 + i % 16, *PROMPT]} for i in range(args.prompts)]
    seconds = []
    for call in range(3):
        sampling = SamplingParams(
            temperature=1.0, max_tokens=(args.tokens - 1) if call else 4, logprobs=0, seed=call, ignore_eos=True
        )
        begin_s = time.perf_counter()
        outputs = engine.generate(prompts, [sampling] * len(prompts), use_tqdm=False)
        seconds.append(time.perf_counter() - begin_s)
    found: list[Any] = [output.outputs[0] for output in outputs]
    ids = np.array([[*p["prompt_token_ids"], *o.token_ids] for p, o in zip(prompts, found, strict=True)])
    logprobs = np.array([[step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)] for o in found])
    arrays = {"ids": ids, "logprobs": logprobs, "seconds": np.array(seconds[1:])}
    if returns_routing:
        # [B, S - 1, layers, k]: the last token was sampled, and never read.
        arrays["routing"] = np.stack([np.asarray(o.routed_experts)[: ids.shape[1] - 1] for o in found])
    np.savez(args.folder / ("routing.npz" if returns_routing else "plain.npz"), **arrays)


class Routers:
    """The routers of a model, whose choices are read or replaced."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.chosen: list[torch.Tensor] = []
        self.given: list[torch.Tensor] | None = None
        routers = [it for it in model.modules() if type(it).__name__ == "Qwen3MoeTopKRouter"]
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda module, inputs, output, layer=layer: self._route(layer, module, output))

    def _route(self, layer: int, router: Any, output: Any) -> Any:
        scores, weights, chosen = output
        if self.given is None:
            self.chosen.append(chosen)
            return output
        given = self.given[layer].to(chosen)
        weights = scores.float().softmax(-1).gather(-1, given)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return scores, weights.to(output[1].dtype), given


@torch.no_grad()
def score(args: argparse.Namespace) -> dict[str, Any]:
    """What Hugging Face's model says of the engine's tokens, with either routing."""
    from transformers import AutoModelForCausalLM

    data = np.load(args.folder / "routing.npz")
    ids = torch.from_numpy(data["ids"]).to(args.device)
    engine = torch.from_numpy(data["logprobs"]).to(args.device)
    routing = torch.from_numpy(data["routing"].astype(np.int64)).to(args.device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=dtype)
    model.to(args.device).eval()
    if args.device == "cuda":
        model.set_experts_implementation("grouped_mm")
    routers = Routers(model)
    sums = {"own": 0.0, "replayed": 0.0}
    same_sets = same_ids = choices = 0
    first = ids.shape[1] - engine.shape[1]
    for rows in range(0, ids.shape[0], 8):
        mine, part = ids[rows : rows + 8], routing[rows : rows + 8]
        for name in sums:
            routers.chosen.clear()
            routers.given = None if name == "own" else [part[:, :, i].flatten(0, 1) for i in range(part.shape[2])]
            logits = model(input_ids=mine[:, :-1], use_cache=False).logits[:, first - 1 :].float()
            logprobs = logits.log_softmax(-1).gather(-1, mine[:, first:, None]).squeeze(-1)
            sums[name] += float((logprobs - engine[rows : rows + 8]).abs().exp().double().sum())
            if name == "own":
                own = torch.stack(routers.chosen, 1).sort(-1).values
                theirs = part.flatten(0, 1).sort(-1).values
                same_sets += int((own == theirs).all(-1).sum())
                same_ids += int((own.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1).sum())
                choices += own[..., 0].numel()
    return {
        "token_mult_prob_error": {name: total / engine.numel() for name, total in sums.items()},
        "same_sets": same_sets / choices,
        "same_experts": same_ids / choices / routing.shape[-1],
        "experts_used": int(routing.unique().numel()),
        "routing_bytes_per_token": int(routing.shape[2] * routing.shape[3]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="12-layers", choices=list(MOE_SHAPES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=["plain", "routing"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        generate(args, returns_routing=args.part == "routing")
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        write_model(args.folder / "model", MOE_SHAPES[args.shape], args.device)
        torch.cuda.empty_cache()
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        for part in ("plain", "routing"):
            command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--folder", folder]
            subprocess.run(command, env=env, check=True)
        seconds = {part: np.load(args.folder / f"{part}.npz")["seconds"].tolist() for part in ("plain", "routing")}
        found = score(args)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "none"
    result = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]),
        "machine": {"gpu": gpu, "torch": torch.__version__},
        "generation_s": seconds,
        **found,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    plain, with_routing = (min(seconds[part]) for part in ("plain", "routing"))
    error = found["token_mult_prob_error"]
    print(f"generation: {plain:.2f} s, with routing returned {with_routing:.2f} s ({with_routing / plain - 1:+.0%})")
    print(f"experts that occur in the returned routing: {found['experts_used']}")
    print(f"same experts in {found['same_experts']:.2%} of choices, the same set in {found['same_sets']:.2%}")
    print(f"token_mult_prob_error: own routing {error['own']:.4f}, the engine's {error['replayed']:.4f}")


if __name__ == "__main__":
    main()
