"""The Triton kernels: on CPU in Triton's interpreter, in a process of its own; on a GPU compiled, with real sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

TEMPERATURES = (1.0, 0.7)


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float, grad: torch.Tensor):
    """Logprobs, the logits' gradient and the entropy by plain torch in float64."""
    exact = logits.detach().double().requires_grad_()
    all_logprobs = (exact / temperature).log_softmax(-1)
    logprobs = all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    logprobs.backward(grad.double())
    return logprobs.detach(), exact.grad, -(all_logprobs.exp() * all_logprobs).sum(-1).detach()


def fused(logits: torch.Tensor, targets: torch.Tensor, temperature: float, grad: torch.Tensor, num_shards: int = 1):
    """The same by the kernels, with the vocabulary cut into shards that are joined by hand."""
    from nemo_offload_rl.backends.scoring.logprob_kernels import logit_gradient_, logit_stats

    size = logits.shape[-1] // num_shards
    shards = [logits[..., i * size : (i + 1) * size].contiguous() for i in range(num_shards)]
    stats = [logit_stats(shard, targets, temperature, i * size, with_entropy=True) for i, shard in enumerate(shards)]
    for i, shard in enumerate(shards):
        *plain, nothing = logit_stats(shard, targets, temperature, i * size)
        assert nothing is None
        assert all(torch.equal(a, b) for a, b in zip(plain, stats[i], strict=False))
    highest = torch.stack([s[0] for s in stats]).amax(0)
    total = sum(s[1] * (s[0] - highest).exp() for s in stats)
    log_sum = total.log()
    logprobs = sum(s[2] for s in stats) - highest - log_sum
    expected = sum((s[3] + s[1] * (s[0] - highest)) * (s[0] - highest).exp() for s in stats) / total
    gradients = [
        logit_gradient_(shard, targets, (highest, log_sum), grad, temperature, i * size)
        for i, shard in enumerate(shards)
    ]
    return logprobs, torch.cat(gradients, dim=-1), log_sum - expected


def check_highest(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> None:
    """A target equals the maximum bit by bit exactly where no logit is above its own."""
    from nemo_offload_rl.backends.scoring.logprob_kernels import logit_stats

    targets = targets.clone()
    targets[..., ::2] = logits.argmax(-1)[..., ::2]
    is_highest = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) == logits.amax(-1)
    assert is_highest.any() and not is_highest.all()
    highest, _, picked, _ = logit_stats(logits, targets, temperature, 0)
    assert torch.equal(picked == highest, is_highest)


def check(device: str, vocabulary: int, dtype: torch.dtype, rows: tuple[int, ...], tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for temperature in TEMPERATURES:
        for num_shards in (1, 2):
            logits = (torch.randn(*rows, vocabulary, generator=generator) * 8 + 30).to(device, dtype)
            targets = torch.randint(0, vocabulary, rows, generator=generator).to(device)
            check_highest(logits, targets, temperature)
            grad = torch.randn(*rows, generator=generator).to(device)
            expected, expected_grad, expected_entropy = reference(logits, targets, temperature, grad)
            logprobs, gradient, entropy = fused(logits, targets, temperature, grad, num_shards)
            torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-4)
            error = (gradient.double() - expected_grad).norm() / expected_grad.norm()
            assert error < tolerance, (temperature, num_shards, float(error))


@pytest.mark.processes
def test_the_kernels_match_float64_softmax_and_its_gradient_in_the_interpreter() -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=400)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_the_kernels_match_float64_softmax_and_its_gradient_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check("cuda", 151936, dtype, (2, 17), tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_logprobs_on_a_gpu_and_their_gradients_are_those_of_the_cpu() -> None:
    from nemo_offload_rl.backends.scoring.logprobs import chunked_scores
    from nemo_offload_rl.keys.worker import TokenFilter
    from nemo_offload_rl.protocols.loss import TokenStat
    from nemo_offload_rl.protocols.vocab import VocabShard

    results, filtered, measurements = [], [], {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layer = torch.nn.Linear(32, 5000, bias=False)
        hidden, targets = torch.randn(21, 32), torch.randint(0, 5000, (21,))
        layer, hidden, targets = layer.to(device), hidden.to(device).requires_grad_(), targets.to(device)
        with torch.no_grad():
            targets[::3] = layer(hidden).argmax(-1)[::3]
        for chunk_size, stat in product((None, 8), (None, *TokenStat)):
            logprobs, measured, _ = chunked_scores(
                layer, hidden, targets, temperature=0.9, chunk_size=chunk_size, shard=VocabShard(0, None), stat=stat
            )
            layer.zero_grad()
            hidden.grad = None
            (logprobs * torch.arange(21.0, device=device)).sum().backward()
            results.append([t.detach().cpu() for t in (logprobs, layer.weight.grad, hidden.grad)])
            if stat is not None:
                measurements.setdefault(stat, []).append(measured.cpu())
        for kept, chunk_size in product(
            (TokenFilter(20, 1.0), TokenFilter(None, 0.6), TokenFilter(50, 0.8)), (None, 8)
        ):
            found = chunked_scores(
                layer, hidden, targets, temperature=0.9, chunk_size=chunk_size, shard=VocabShard(0, None),
                stat=TokenStat.ENTROPY, kept=kept, with_whole=True,
            )  # fmt: skip
            layer.zero_grad()
            hidden.grad = None
            (found.logprobs + 0.5 * found.whole).mul(torch.arange(21.0, device=device)).sum().backward()
            filtered.append([t.detach().cpu() for t in (*found, layer.weight.grad, hidden.grad)])
    half = len(filtered) // 2
    for left, right in zip(filtered[:half], filtered[half:], strict=True):
        for one, other in zip(left, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3)
    for first, *others in measurements.values():
        for other in others:
            torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-5)
    # On one device the stat changes no bit of logprobs and gradients.
    for first in range(0, len(results), 3):
        for other in results[first + 1 : first + 3]:
            assert all(torch.equal(left, right) for left, right in zip(results[first], other, strict=True))


if __name__ == "__main__":
    check("cpu", 1000, torch.float32, (3, 4), 1e-5)
    check("cpu", 10000, torch.float32, (4,), 1e-5)
    check("cpu", 1000, torch.bfloat16, (3, 4), 4e-3)
