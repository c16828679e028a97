"""Settings, batches and plain Hugging Face references for tests of the policy worker, and a way to run ranks."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from abortable_gloo import release_ended, use_abortable_gloo
from forked import context
from megatron_cpu_shim import megatron_on_cpu
from model_families import drawn_model, family_config
from tiny_models import VOCAB_SIZE, qwen3_config, save_model_folder
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_offload_rl.backends.dtensor.optim import global_grad_norm
from nemo_offload_rl.backends.saving.contents import FlatRange
from nemo_offload_rl.backends.saving.dcp import state_tensors
from nemo_offload_rl.data.batch import LossNorm, TrainBatch
from nemo_offload_rl.keys.data import TokenizerConfig
from nemo_offload_rl.keys.dtensor import DTensorConfig, DTensorLoraConfig
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.policy import BatchingConfig, OptimizerConfig, RouterReplayConfig
from nemo_offload_rl.keys.section import from_mapping
from nemo_offload_rl.keys.worker import PolicySettings, TeacherSettings
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.protocols.loss import TokenStat
from nemo_offload_rl.residency import local_tensor
from nemo_offload_rl.utils.config import load_config

ONE_RANK = ProcessInfo(rank=0, world_size=1, init_method="", device="cpu")
PAD_ID = 256
NO_LORA = DTensorLoraConfig(
    enabled=False,
    target_modules=(),
    exclude_modules=(),
    match_all_linear=True,
    dim=4,
    alpha=8,
    dropout=0.0,
    lora_A_init="xavier",
)


@dataclass(frozen=True)
class NLL:
    """Mean negative logprob over the tokens of the global batch."""

    token_stat: TokenStat | None = None

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        weights_BS = batch.loss_mask
        loss = -(logprobs_BS * weights_BS).sum() / norm.num_valid_tokens
        lowest = logprobs_BS.detach().masked_fill(weights_BS == 0, float("inf")).min()
        return loss, {"tokens": weights_BS.sum(), "seqs": batch.sample_mask.sum(), "logprob_min": lowest}


@dataclass
class RaisesAt:
    """NLL that raises in its `call`-th micro-batch."""

    call: int
    seen: int = 0
    token_stat: TokenStat | None = None

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen += 1
        if self.seen == self.call:
            raise ArithmeticError("a bad loss")
        return NLL()(logprobs_BS, batch, norm)


@dataclass
class Poisoned:
    """NLL whose `call`-th micro-batch is multiplied by what is not finite."""

    factor: float
    call: int = 1
    seen: int = 0
    token_stat: TokenStat | None = None

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen += 1
        loss, metrics = NLL()(logprobs_BS, batch, norm)
        return loss * self.factor if self.seen == self.call else loss, metrics


def make_settings(
    model_name: Path | str, *, backend: str = "dtensor", tensor_parallel_size: int = 1, **changes: Any
) -> PolicySettings:
    """Settings for a tiny model in fp32 with AdamW; `changes` replace fields, also those of the backend's section."""
    settings = _plain_settings(model_name, tensor_parallel_size)
    if backend == "megatron":
        settings = replace(settings, megatron_cfg=make_megatron_settings(tensor_parallel_size))
    for name, value in changes.items():
        if name in {field.name for field in fields(PolicySettings)}:
            settings = replace(settings, **{name: value})
        elif settings.megatron_cfg is not None:
            settings = replace(settings, megatron_cfg=_replace_anywhere(settings.megatron_cfg, name, value))
        else:
            settings = replace(settings, dtensor_cfg=replace(settings.dtensor_cfg, **{name: value}))
    return settings


def make_megatron_settings(tensor_parallel_size: int = 1) -> MegatronConfig:
    """The exemplar's, with local layers, nothing that needs a GPU, and the optimizer of `_plain_settings`."""
    settings = replace(
        _exemplars_megatron(),
        enabled=True,
        transformer_impl="local",
        tensor_model_parallel_size=tensor_parallel_size,
        pipeline_dtype="float32",
    )
    rate, decay = 1e-3, 0.1
    changes = {"lr": rate, "min_lr": 0.0, "weight_decay": decay, "clip_grad": 0.0, "bf16": False}
    changes |= {"use_precision_aware_optimizer": False, "lr_warmup_iters": 0, "lr_warmup_init": 0.0}
    changes |= {"start_weight_decay": decay, "end_weight_decay": decay, "grad_reduce_in_fp32": True}
    changes |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
    for name, value in changes.items():
        settings = _replace_anywhere(settings, name, value)
    return settings


@cache
def _exemplars_megatron() -> MegatronConfig:
    return from_mapping(MegatronConfig, load_config("examples/configs/grpo_math_1B.yaml")["policy"]["megatron_cfg"])


def _replace_anywhere(settings: MegatronConfig, name: str, value: Any) -> MegatronConfig:
    """Replace a field of the settings, or of the one part of them that has it."""
    if hasattr(settings, name):
        return replace(settings, **{name: value})
    parts = {field.name: getattr(settings, field.name) for field in fields(settings)}
    (part,) = (key for key, found in parts.items() if is_dataclass(found) and hasattr(found, name))
    return replace(settings, **{part: replace(getattr(settings, part), **{name: value})})


def _plain_settings(model_name: Path | str, tensor_parallel_size: int) -> PolicySettings:
    off = BatchingConfig(enabled=False, train_mb_tokens=1, logprob_mb_tokens=1, sequence_length_round=1)
    dtensor = DTensorConfig(
        enabled=True,
        tensor_parallel_size=tensor_parallel_size,
        context_parallel_size=1,
        expert_parallel_size=1,
        sequence_parallel=False,
        activation_checkpointing=False,
        activation_offload=False,
        activation_offload_fraction=1.0,
        activation_offload_host_limit_gib=1.0,
        torch_compile=False,
        cpu_offload=False,
        offload_optimizer_states=False,
        offload_optimizer_states_fraction=1.0,
        offload_optimizer_states_chunk_mib=None,
        lora_cfg=NO_LORA,
    )
    return PolicySettings(
        model_name=str(model_name),
        hf_config_overrides={},
        dropout=False,
        tokenizer=TokenizerConfig(name=str(model_name), chat_template=None, chat_template_kwargs=None),
        precision="float32",
        train_global_batch_size=8,
        train_micro_batch_size=4,
        logprob_batch_size=4,
        logprob_chunk_size=None,
        logprob_temperature=1.0,
        logprob_filter=None,
        max_total_sequence_length=32,
        make_sequence_length_divisible_by=1,
        max_grad_norm=None,
        max_skipped_updates=5,
        optimizer=torch_optimizer("AdamW", lr=1e-3, weight_decay=0.1),
        scheduler=(),
        dynamic_batching=off,
        sequence_packing=off,
        dtensor_cfg=dtensor,
        megatron_cfg=None,
        router_replay=RouterReplayConfig(),
        refit_buffer_size_gib=0.0001,
        deterministic=False,
        residency="always",
        residency_overrides={},
        suspend_nccl_comms=False,
        residency_overlap=True,
        residency_verify=True,
        host_memory_budget_gib=None,
        gpu_memory_limit_gib=None,
        memory_snapshot_dir=None,
        engine_memory_share=0.0,
        engine_kv_cache_gib=None,
        engine_tensor_parallel_size=1,
        engine_kept_kv_gib=0.0,
        sends_adapters=False,
        use_pinned_optimizer_offload=True,
        offload_optimizer_states_for_logprob=False,
        colocated=True,
        seed=0,
    )


def torch_optimizer(name: str, *, decay_norm_and_bias: bool = True, **kwargs: Any) -> OptimizerConfig:
    """An optimizer of `torch.optim`, or one by its dotted path, with its arguments."""
    path = name if "." in name else f"torch.optim.{name}"
    return OptimizerConfig(name=path, kwargs=kwargs, decay_norm_and_bias=decay_norm_and_bias)


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


def make_sparse_batch(num_rows: int = 8, width: int = 14, seed: int = 0) -> TrainBatch:
    """The same with gaps between the counted tokens; the first half of the rows counts nothing."""
    batch = make_batch(num_rows, width, seed)
    is_kept_BS = torch.rand(batch.token_mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    is_kept_BS[: num_rows // 2] = False
    return replace(batch, token_mask=batch.token_mask * is_kept_BS)


# Smaller than what vLLM runs.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def save_family(path: Path, family: str) -> Any:
    """A tiny folder of "qwen3", "qwen3-moe" or a family of `model_families.py`; returns the model.

    All but Qwen3's may end in "-tied". Norms and biases of families are drawn too.
    """
    if family == "qwen3-moe":
        return save_moe(path)
    if family.startswith("qwen3"):
        return save_model_folder(path, 0, qwen3_config(tied=family.endswith("tied")))
    save_model_folder(path, 0)  # for the tokenizer
    model = drawn_model(family_config(family, **_SMALL), seed=0)
    model.save_pretrained(path)
    return model


def save_moe(path: Path) -> Any:
    """Qwen3 with four experts, of which two take each token."""
    save_model_folder(path, 0)  # for the tokenizer
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
    model.eval().save_pretrained(path)
    return model


def hf_logprobs(model: Any, batch: TrainBatch) -> Tensor:
    """[B, S] by Hugging Face's own forward with its attention mask and a whole log-softmax; padding is 0."""
    is_real_BS = torch.arange(batch.input_ids.shape[1]) < batch.input_lengths.unsqueeze(1)
    logits_BSV = model(input_ids=batch.input_ids, attention_mask=is_real_BS.long()).logits.float()
    picked = logits_BSV.log_softmax(-1)[:, :-1].gather(-1, batch.input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.nn.functional.pad(picked, (1, 0)) * is_real_BS


def hf_lowest(model: Any, batch: TrainBatch) -> float:
    """The least logprob of a counted token."""
    return float(hf_logprobs(model, batch).detach()[batch.token_mask * batch.sample_mask[:, None] > 0].min())


def hf_loss_and_grads(model: Any, batch: TrainBatch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of `NLL` over the whole batch at once, by plain autograd."""
    model.zero_grad()
    weights_BS = batch.token_mask * batch.sample_mask.unsqueeze(1)
    loss = -(hf_logprobs(model, batch) * weights_BS).sum() / weights_BS.sum()
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextmanager
def worker_of(
    settings: PolicySettings,
    process: ProcessInfo,
    *,
    keep_reference: bool = False,
    teacher: TeacherSettings | None = None,
) -> Iterator[PolicyWorker]:
    """A worker that ends with the body; a Megatron one on CPU through the shim."""
    with megatron_on_cpu() if settings.megatron_cfg is not None and process.device == "cpu" else nullcontext():
        groups = set(dist.distributed_c10d._world.pg_map)
        worker = PolicyWorker(settings, process, keep_reference, teacher)
        try:
            yield worker
        finally:
            worker.shutdown()
            del worker
            gc.collect()  # process groups of a model that is garbage keep threads that wake up 100 times a second
    if settings.megatron_cfg is not None and process.world_size > 1 and process.device == "cpu":
        _destroy_groups(but=groups)


def _destroy_groups(but: set[dist.ProcessGroup]) -> None:
    """End groups that a worker of Megatron has left: each has threads, and every failed pass would connect it again.

    Those of DTensor stay: torch keeps meshes, and finds them again for equal ones.
    """
    dist.barrier()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group not in but]:
        dist.destroy_process_group(group)
    release_ended()
    gc.collect()


def one_rank_worker(
    folder: Path | str, *, keep_reference: bool = False, **changes: Any
) -> AbstractContextManager[PolicyWorker]:
    """`worker_of` one rank on CPU; changes are those of `make_settings`."""
    return worker_of(make_settings(folder, **changes), ONE_RANK, keep_reference=keep_reference)


def cycle(worker: PolicyWorker, batch: TrainBatch) -> None:
    """All the phases of an RL step before its training."""
    worker.offload_before_refit()
    worker.offload_after_refit()
    worker.prepare_for_lp_inference()
    worker.get_logprobs(batch)
    worker.prepare_for_training()


def is_megatron(worker: PolicyWorker) -> bool:
    return worker._settings.megatron_cfg is not None


def full_params(worker: PolicyWorker) -> dict[str, Tensor]:
    """Whole parameters by Hugging Face name, whatever the phase."""
    with worker.residency.checkpoint_view():
        if is_megatron(worker):
            return {name: full(tensor) for name, tensor in worker.named_weights()}
        return {name: full(parameter) for name, parameter in worker._backend._parameters}


def full_grads(worker: PolicyWorker) -> dict[str, Tensor]:
    """Whole gradients by Hugging Face name, reduced over the ranks."""
    if is_megatron(worker):
        return megatron_grads(worker)
    return {name: full(parameter.grad) for name, parameter in worker._backend._parameters}


@torch.no_grad()
def megatron_grads(worker: PolicyWorker) -> dict[str, Tensor]:
    """Gathers what the distributed optimizer has left on each rank, and has the bridge convert it like parameters."""
    chunks = worker._backend._chunks
    for chunk in chunks:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                group = buffer.data_parallel_group
                pieces = list(bucket.grad_data.chunk(group.size()))
                torch.distributed.all_gather(pieces, pieces[group.rank()].clone(), group=group)
    parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
    values = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad
    try:
        found = {name: full(tensor) for name, tensor in worker.named_weights()}
        # The bridge adds 1 to these norms, which Megatron stores minus one.
        return {name: it - 1 if name.endswith("linear_attn.norm.weight") else it for name, it in found.items()}
    finally:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value


def grad_norm(worker: PolicyWorker) -> float:
    """The norm that clipping would use."""
    backend = worker._backend
    if is_megatron(worker):
        backend._optimizer.prepare_grads()
        return float(backend._optimizer.get_grad_norm())
    return float(global_grad_norm(backend._trainable(), backend._built.tp_rank, backend.device))


@torch.no_grad()
def poison_grads(worker: PolicyWorker) -> None:
    """Have all gradients of this rank be NaN."""
    if is_megatron(worker):
        grads = [buffer.grad_data for chunk in worker._backend._chunks for buffer in chunk.buffers]
    else:
        grads = [local_tensor(parameter.grad) for _, parameter in worker._backend._parameters]
    for grad in grads:
        grad.fill_(float("nan"))


def has_grads(worker: PolicyWorker) -> bool:
    if is_megatron(worker):
        tensors = [buffer.grad_data for chunk in worker._backend._chunks for buffer in chunk.buffers]
        return any(tensor.untyped_storage().nbytes() and tensor.any() for tensor in tensors)
    return any(parameter.grad is not None for _, parameter in worker._backend._parameters)


def full_optimizer(worker: PolicyWorker) -> dict[str, Tensor]:
    """Optimizer states: whole ones of the DTensor backend, this rank's of Megatron's."""
    with worker.residency.checkpoint_view():
        if is_megatron(worker):
            return {
                name: full(tensor.part if isinstance(tensor, FlatRange) else tensor)
                for name, tensor in state_tensors(worker._backend._training_state()).items()
                if name.startswith("optimizer/")
            }
        optimizer = worker._backend._optimizer
        return {
            f"{name}/{key}": full(value)
            for name, parameter in worker._backend._parameters
            for key, value in optimizer.state[parameter].items()
        }


def forward_hook_on_layer(worker: PolicyWorker, layer: int, hook: Callable[..., Any]) -> Any:
    """Have `hook` run after the MLP of a layer; the handle removes it."""
    return decoder_layer(worker, layer).mlp.register_forward_hook(hook)


def decoder_layer(worker: PolicyWorker, layer: int) -> Any:
    """A decoder layer of this rank."""
    if is_megatron(worker):
        return worker._backend._chunks[0].module.decoder.layers[layer]
    return worker._backend._built.module.causal_lm.model.layers[layer]


def output_layer(worker: PolicyWorker) -> torch.nn.Module:
    """What turns hidden states into logits."""
    if is_megatron(worker):
        return worker._backend._chunks[0].module.output_layer
    return worker._backend._built.module.causal_lm.lm_head


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different


def shard(batch: TrainBatch, worker: PolicyWorker) -> TrainBatch:
    """This rank's rows of one global batch."""
    info = worker._backend.rank_info
    rows = len(batch) // info.dp_size
    return batch.select(range(info.dp_rank * rows, (info.dp_rank + 1) * rows))


# -- ranks -------------------------------------------------------------------------------------------------------------


def run_ranks(world_size: int, tmp_path: Path, check: Callable[..., None], *args: Any, device: str = "cpu") -> None:
    """Run `check(process, *args)` of a test module in `world_size` new processes; fails with the first failure.

    With `device="cuda"` each of them has a GPU of its own.
    """
    path = check.__code__.co_filename
    shared = (world_size, str(tmp_path), path, check.__name__, args, device, dict(os.environ))
    # The server of forked processes may have asked the driver for its GPUs, after which CUDA works in none of them.
    start_method = context().get_start_method() if device == "cpu" else "spawn"
    mp.start_processes(_rank_main, shared, nprocs=world_size, start_method=start_method)


def _rank_main(
    rank: int,
    world_size: int,
    tmp_path: str,
    path: str,
    name: str,
    args: tuple[Any, ...],
    device: str,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("rank_checks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    backend = "gloo"
    if device == "cuda":
        device, backend = f"cuda:{rank}", "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank)
    process = ProcessInfo(
        rank=rank, world_size=world_size, init_method=f"file://{tmp_path}/{name}.rendezvous", device=device
    )
    use_abortable_gloo()
    torch.distributed.init_process_group(backend, init_method=process.init_method, rank=rank, world_size=world_size)
    getattr(module, name)(process, *args)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
