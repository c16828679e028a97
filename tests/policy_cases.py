"""Settings, batches and plain Hugging Face references for tests of the policy worker, and a way to run ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from tiny_models import VOCAB_SIZE, qwen3_config, save_model_folder
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nemo_offload_rl.data.batch import LossNorm, TrainBatch
from nemo_offload_rl.policy.backends.base import ProcessInfo
from nemo_offload_rl.policy.settings import BatchingSettings, DTensorSettings, OptimizerSettings, PolicySettings
from nemo_offload_rl.policy.worker import PolicyWorker

PAD_ID = 256


@dataclass(frozen=True)
class NLL:
    """Mean negative logprob over the tokens of the global batch."""

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        weights_BS = batch.token_mask * batch.sample_mask.unsqueeze(1)
        loss = -(logprobs_BS * weights_BS).sum() / norm.num_valid_tokens
        lowest = logprobs_BS.detach().min()
        return loss, {"tokens": weights_BS.sum(), "seqs": batch.sample_mask.sum(), "logprob_min": lowest}


@dataclass
class RaisesAt:
    """NLL that raises in its `call`-th micro-batch."""

    call: int
    seen: int = 0

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen += 1
        if self.seen == self.call:
            raise ArithmeticError("a bad loss")
        return NLL()(logprobs_BS, batch, norm)


def make_settings(model_name: Path | str, *, tensor_parallel_size: int = 1, **changes: Any) -> PolicySettings:
    """Settings for a tiny model in fp32 with AdamW; `changes` replace fields, also those of `dtensor_cfg`."""
    off = BatchingSettings(enabled=False, train_mb_tokens=1, logprob_mb_tokens=1, sequence_length_round=1)
    dtensor = DTensorSettings(
        enabled=True,
        tensor_parallel_size=tensor_parallel_size,
        context_parallel_size=1,
        sequence_parallel=False,
        activation_checkpointing=False,
        cpu_offload=False,
        offload_optimizer_states=False,
    )
    settings = PolicySettings(
        model_name=str(model_name),
        hf_config_overrides={},
        precision="float32",
        train_global_batch_size=8,
        train_micro_batch_size=2,
        logprob_batch_size=3,
        logprob_chunk_size=None,
        logprob_temperature=1.0,
        max_total_sequence_length=32,
        make_sequence_length_divisible_by=1,
        max_grad_norm=None,
        optimizer=OptimizerSettings(name="torch.optim.AdamW", kwargs={"lr": 1e-3, "weight_decay": 0.1}),
        scheduler=(),
        dynamic_batching=off,
        sequence_packing=off,
        dtensor_cfg=dtensor,
        refit_buffer_size_gib=0.0001,
        residency="always",
        residency_overrides={},
        residency_overlap=True,
        residency_verify=True,
        host_memory_budget_gib=None,
        memory_snapshot_dir=None,
        engine_memory_share=0.0,
        use_pinned_optimizer_offload=True,
        offload_optimizer_states_for_logprob=False,
        colocated=True,
        seed=0,
    )
    for name, value in changes.items():
        if hasattr(dtensor, name):
            settings = replace(settings, dtensor_cfg=replace(settings.dtensor_cfg, **{name: value}))
        else:
            settings = replace(settings, **{name: value})
    return settings


def make_batch(num_rows: int = 8, width: int = 14, seed: int = 0) -> TrainBatch:
    """Rows of different lengths; the first third of each is a prompt, one row is dropped by its mask."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(3, width + 1, (num_rows,), generator=generator)
    ids_BS = torch.randint(0, PAD_ID, (num_rows, width), generator=generator)
    position_S = torch.arange(width)
    is_real_BS = position_S < lengths_B.unsqueeze(1)
    sample_mask = torch.ones(num_rows)
    sample_mask[1] = 0
    return TrainBatch(
        input_ids=torch.where(is_real_BS, ids_BS, PAD_ID),
        input_lengths=lengths_B,
        token_mask=(is_real_BS & (position_S >= (lengths_B // 3).clamp(min=1).unsqueeze(1))).float(),
        sample_mask=sample_mask,
    )


def save_family(path: Path, family: str) -> Any:
    """A tiny model folder of a family ("qwen3", "qwen3-tied", "qwen2", "llama-tied"); returns the model."""
    if family.startswith("qwen3"):
        return save_model_folder(path, 0, qwen3_config(tied=family.endswith("tied")))
    save_model_folder(path, 0)  # for the tokenizer
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "tie_word_embeddings": family.endswith("tied"),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**sizes)) if family == "qwen2" else LlamaForCausalLM(LlamaConfig(**sizes))
    model.eval().save_pretrained(path)
    return model


def hf_logprobs(model: Any, batch: TrainBatch) -> Tensor:
    """[B, S] by Hugging Face's own forward with its attention mask and a whole log-softmax; padding is 0."""
    is_real_BS = torch.arange(batch.input_ids.shape[1]) < batch.input_lengths.unsqueeze(1)
    logits_BSV = model(input_ids=batch.input_ids, attention_mask=is_real_BS.long()).logits.float()
    picked = logits_BSV.log_softmax(-1)[:, :-1].gather(-1, batch.input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.nn.functional.pad(picked, (1, 0)) * is_real_BS


def hf_loss_and_grads(model: Any, batch: TrainBatch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of `NLL` over the whole batch at once, by plain autograd."""
    model.zero_grad()
    weights_BS = batch.token_mask * batch.sample_mask.unsqueeze(1)
    loss = -(hf_logprobs(model, batch) * weights_BS).sum() / weights_BS.sum()
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full_params(worker: PolicyWorker) -> dict[str, Tensor]:
    """Whole parameters by Hugging Face name, whatever the phase."""
    with worker.residency.checkpoint_view():
        return {name: full(parameter) for name, parameter in worker._backend._parameters}


def full_grads(worker: PolicyWorker) -> dict[str, Tensor]:
    return {name: full(parameter.grad) for name, parameter in worker._backend._parameters}


def full_optimizer(worker: PolicyWorker) -> dict[str, Tensor]:
    with worker.residency.checkpoint_view():
        optimizer = worker._backend._optimizer
        return {
            f"{name}/{key}": full(value)
            for name, parameter in worker._backend._parameters
            for key, value in optimizer.state[parameter].items()
        }


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def shard(batch: TrainBatch, worker: PolicyWorker) -> TrainBatch:
    """This rank's rows of one global batch."""
    info = worker._backend.rank_info
    rows = len(batch) // info.dp_size
    return batch.select(range(info.dp_rank * rows, (info.dp_rank + 1) * rows))


# -- ranks -------------------------------------------------------------------------------------------------------------


def run_ranks(world_size: int, tmp_path: Path, check: Callable[..., None], *args: Any) -> None:
    """Run `check(make_process, *args)` of a test module in `world_size` new processes; fails with the first failure."""
    path = check.__code__.co_filename
    mp.spawn(_rank_main, (world_size, str(tmp_path), path, check.__name__, args), nprocs=world_size)


def _rank_main(rank: int, world_size: int, tmp_path: str, path: str, name: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("rank_checks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    process = ProcessInfo(
        rank=rank, world_size=world_size, init_method=f"file://{tmp_path}/{name}.rendezvous", device="cpu"
    )
    torch.distributed.init_process_group("gloo", init_method=process.init_method, rank=rank, world_size=world_size)
    getattr(module, name)(process, *args)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
