"""The Triton kernels: on CPU in Triton's interpreter, in a process of its own; on a GPU compiled, with real sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TEMPERATURES = (1.0, 0.7)


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float, grad: torch.Tensor):
    """Logprobs and the logits' gradient by plain torch in float64."""
    exact = logits.detach().double().requires_grad_()
    logprobs = (exact / temperature).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    logprobs.backward(grad.double())
    return logprobs.detach(), exact.grad


def fused(logits: torch.Tensor, targets: torch.Tensor, temperature: float, grad: torch.Tensor, num_shards: int = 1):
    """The same by the kernels, with the vocabulary cut into shards that are joined by hand."""
    from nemo_offload_rl.policy.backends.logprob_kernels import logit_gradient_, logit_stats

    size = logits.shape[-1] // num_shards
    shards = [logits[..., i * size : (i + 1) * size].contiguous() for i in range(num_shards)]
    stats = [logit_stats(shard, targets, temperature, i * size) for i, shard in enumerate(shards)]
    highest = torch.stack([s[0] for s in stats]).amax(0)
    log_sum = sum(s[1] * (s[0] - highest).exp() for s in stats).log()
    logprobs = sum(s[2] for s in stats) - highest - log_sum
    gradients = [
        logit_gradient_(shard, targets, (highest, log_sum), grad, temperature, i * size)
        for i, shard in enumerate(shards)
    ]
    return logprobs, torch.cat(gradients, dim=-1)


def check(device: str, vocabulary: int, dtype: torch.dtype, rows: tuple[int, ...], tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for temperature in TEMPERATURES:
        for num_shards in (1, 2):
            logits = (torch.randn(*rows, vocabulary, generator=generator) * 8 + 30).to(device, dtype)
            targets = torch.randint(0, vocabulary, rows, generator=generator).to(device)
            grad = torch.randn(*rows, generator=generator).to(device)
            expected, expected_grad = reference(logits, targets, temperature, grad)
            logprobs, gradient = fused(logits, targets, temperature, grad, num_shards)
            torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-4)
            error = (gradient.double() - expected_grad).norm() / expected_grad.norm()
            assert error < tolerance, (temperature, num_shards, float(error))


def test_the_kernels_match_float64_softmax_and_its_gradient_in_the_interpreter() -> None:
    root = Path(__file__).parents[4]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=120)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_the_kernels_match_float64_softmax_and_its_gradient_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check("cuda", 151936, dtype, (2, 17), tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_logprobs_on_a_gpu_and_their_gradients_are_those_of_the_cpu() -> None:
    from nemo_offload_rl.policy.backends.logprobs import VocabShard, chunked_logprobs

    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layer = torch.nn.Linear(32, 5000, bias=False)
        hidden, targets = torch.randn(21, 32), torch.randint(0, 5000, (21,))
        layer, hidden, targets = layer.to(device), hidden.to(device).requires_grad_(), targets.to(device)
        for chunk_size in (None, 8):
            logprobs = chunked_logprobs(
                layer, hidden, targets, temperature=0.9, chunk_size=chunk_size, shard=VocabShard(0, None)
            )
            layer.zero_grad()
            hidden.grad = None
            (logprobs * torch.arange(21.0, device=device)).sum().backward()
            results.append([t.detach().cpu() for t in (logprobs, layer.weight.grad, hidden.grad)])
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    check("cpu", 1000, torch.float32, (3, 4), 1e-5)
    check("cpu", 10000, torch.float32, (5,), 1e-5)
    check("cpu", 1000, torch.bfloat16, (3, 4), 4e-3)
