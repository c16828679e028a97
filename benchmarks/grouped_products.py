"""The products of many experts: Transformer Engine's GroupedLinear beside torch's grouped_mm, forward and backward.

    python benchmarks/grouped_products.py --json grouped_products.json
    python benchmarks/grouped_products.py --cpu

Both compute a layer of a mixture of experts in bfloat16 and add the gradients of the weights to float32 buffers, as
Megatron does. Transformer Engine calls cuBLAS for each expert, grouped_mm starts one kernel. Printed for each number of
tokens: milliseconds until the host has started everything, and until the GPU is done.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from grpo_gpu import machine

ACTIVE = 8  # experts of a token


class GroupedProduct(torch.autograd.Function):
    """`rows_RI @ weights_EOI[e].T` for the rows of each expert; the weights' gradients are added to `sums_EOI`."""

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weights_EOI: Tensor, sums_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RI, weights_EOI, sums_EOI, ends_E)
        return torch.nn.functional.grouped_mm(rows_RI, weights_EOI.transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_RO,) = grads
        rows_RI, weights_EOI, sums_EOI, ends_E = ctx.saved_tensors
        sums_EOI.add_(torch.nn.functional.grouped_mm(grad_RO.t(), rows_RI, offs=ends_E))
        return torch.nn.functional.grouped_mm(grad_RO, weights_EOI, offs=ends_E), None, None, None


def make_torch(weights_EOI: Tensor) -> Callable[[Tensor, list[int]], tuple[Tensor, Tensor]]:
    """Runs the product, and returns its output and the buffer of gradients."""
    sums_EOI = torch.zeros_like(weights_EOI, dtype=torch.float32)

    def run(rows_RI: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
        counts_E = torch.tensor(counts, dtype=torch.int32)
        ends_E = counts_E.cumsum(0, dtype=torch.int32).to(rows_RI.device, non_blocking=True)
        made: Any = GroupedProduct.apply(rows_RI, weights_EOI, sums_EOI, ends_E)
        return made, sums_EOI

    return run


def make_transformer_engine(weights_EOI: Tensor) -> Callable[[Tensor, list[int]], tuple[Tensor, Tensor]]:
    """The same by Transformer Engine."""
    from transformer_engine.pytorch import GroupedLinear  # pyright: ignore[reportMissingImports]

    num_experts, num_out, num_in = weights_EOI.shape
    layer = GroupedLinear(
        num_experts, num_in, num_out, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True
    )
    sums_EOI = torch.zeros_like(weights_EOI, dtype=torch.float32)
    for expert in range(num_experts):
        weight = getattr(layer, f"weight{expert}")
        weight.data.copy_(weights_EOI[expert])
        weight.main_grad = sums_EOI[expert]

    def run(rows_RI: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
        return layer(rows_RI, counts), sums_EOI

    return run


def plainly(rows_RI: Tensor, weights_EOI: Tensor, counts: list[int]) -> list[Tensor]:
    """Output, gradients of the weights and of the rows, expert by expert in float32."""
    made, sums, grads = [], [], []
    for some_RI, weight_OI in zip(rows_RI.detach().float().split(counts), weights_EOI.float(), strict=True):
        made.append(some_RI @ weight_OI.t())
        grad = torch.ones_like(made[-1])
        sums.append(grad.t() @ some_RI)
        grads.append(grad @ weight_OI)
    return [torch.cat(made), torch.stack(sums), torch.cat(grads)]


def measure(
    run: Callable[..., tuple[Tensor, Tensor]], rows_RI: Tensor, counts: list[int], times: int
) -> dict[str, Any]:
    """Median milliseconds of host and device, and the results of the first time."""
    wait = torch.cuda.synchronize if rows_RI.is_cuda else (lambda: None)
    host: list[float] = []
    whole: list[float] = []
    first: list[Tensor] = []
    for number in range(times + 2):
        rows_RI.grad = None
        wait()
        begin = time.perf_counter()
        made, sums = run(rows_RI, counts)
        made.backward(torch.ones_like(made))
        host.append(1e3 * (time.perf_counter() - begin))
        wait()
        whole.append(1e3 * (time.perf_counter() - begin))
        if number == 0:
            assert rows_RI.grad is not None
            first = [made.detach().clone(), sums.clone(), rows_RI.grad]
    return {"host_ms": statistics.median(host[2:]), "ms": statistics.median(whole[2:]), "results": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2304, 8192, 32768])
    parser.add_argument("--sizes", type=int, nargs=2, default=[2048, 1536], help="in and out")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help="torch alone, and small")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    variants = (
        {"torch": make_torch} if arguments.cpu else {"transformer engine": make_transformer_engine, "torch": make_torch}
    )
    device, rows = ("cpu", []) if arguments.cpu else ("cuda", [])
    if arguments.cpu:
        arguments.experts, arguments.tokens, arguments.sizes, arguments.times = [4], [64], [32, 16], 2
    torch.manual_seed(0)
    num_in, num_out = arguments.sizes
    print(f"{'experts':>8s}{'tokens':>8s}  {'':20s}{'host ms':>9s}{'ms':>9s}{'error':>9s}")
    for num_experts in arguments.experts:
        weights_EOI = torch.randn(num_experts, num_out, num_in, device=device, dtype=torch.bfloat16) / num_in**0.5
        runs = {name: make(weights_EOI) for name, make in variants.items()}
        for num_tokens in arguments.tokens:
            # Random routing; every expert has a few more or less than the others.
            experts_T = torch.randint(num_experts, (num_tokens * ACTIVE,))
            counts = torch.bincount(experts_T, minlength=num_experts).tolist()
            rows_RI = torch.randn(num_tokens * ACTIVE, num_in, device=device, dtype=torch.bfloat16, requires_grad=True)
            expected = plainly(rows_RI, weights_EOI, counts)
            for name, run in runs.items():
                run(rows_RI, counts)[1].zero_()
                found = measure(run, rows_RI, counts, arguments.times)
                pairs = zip(found.pop("results"), expected, strict=True)
                found["error"] = max(((a.float() - b).norm() / b.norm()).item() for a, b in pairs)
                rows.append({"experts": num_experts, "tokens": num_tokens, "variant": name, **found})
                shown = f"{found['host_ms']:9.2f}{found['ms']:9.2f}{found['error']:9.1e}"
                print(f"{num_experts:8d}{num_tokens:8d}  {name:20s}{shown}", flush=True)
    if arguments.json:
        told = {
            "machine": machine(),
            "command": " ".join(["python", *sys.argv]),
            "sizes": arguments.sizes,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
