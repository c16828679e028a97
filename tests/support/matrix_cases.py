"""What a backend is seen to do with a family: one row of the matrix, of which docs/reference/models.md is made.

Each function is one run of a worker, beside Hugging Face's own model (eager attention, float32) and plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from closeness import NUM_TERMS, assert_close
from engine_process import EngineProcess
from lora_cases import lora_worker
from model_families import FAMILIES, as_published, checkpoint_name, checkpoint_tensors, family_config, trained_by
from models_page import CP, SP, TP
from policy_cases import (
    NLL,
    ONE_RANK,
    assert_equal,
    full_grads,
    full_params,
    grad_norm,
    hf_logprobs,
    hf_loss_and_grads,
    make_batch,
    make_settings,
    shard,
    torch_optimizer,
    worker_of,
)
from resume_cases import weights_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.dtensor.supported import context_problem, declared_plan, experts_problem, split_problem
from nemo_offload_rl.backends.hf.weight_files import HubNames
from nemo_offload_rl.backends.megatron.supported import tensor_parallel_problem
from nemo_offload_rl.data.batch import SampledSequence, TokenBatch, collate_samples
from nemo_offload_rl.distributed.local import LocalWorkerGroup
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.keys.policy import BatchingConfig, RouterReplayConfig
from nemo_offload_rl.models.families import DTENSOR, MEGATRON
from nemo_offload_rl.models.families import FAMILIES as RECORDS
from nemo_offload_rl.models.served import is_served_on_gpus_only, untold_experts
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.protocols.engine import Completion
from nemo_offload_rl.protocols.loss import TrainResult
from nemo_offload_rl.weight_sync.refit import refit

# Adam divides by small numbers where a gradient is near 0: an epsilon of their size keeps roundings what they are.
ROWS = [(name, backend) for name in FAMILIES for backend in trained_by(name)]
DATA_PARALLELISM = "two data-parallel ranks"
RATE, EPSILON = 1e-3, 1e-2
PACKING = BatchingConfig(enabled=True, train_mb_tokens=40, logprob_mb_tokens=60, sequence_length_round=1)
BATCHES = [make_batch(seed=seed) for seed in range(2)]
GREEDY = SamplingSettings(max_new_tokens=12, temperature=0.0)
# vLLM's cache blocks hold 128 tokens on CPU: the last two prompts fill one and two of them.
PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 60, 140, 300)]


@dataclass(frozen=True)
class Row:
    """One entry of the matrix.

    Attributes:
        name: Of `model_families.FAMILIES`.
        backend: `DTENSOR` or `MEGATRON`.
        folder: The tiny model.
    """

    name: str
    backend: str
    folder: Path

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return ModelShape.of(family_config(self.name).to_dict()).num_experts > 0

    @property
    def is_served(self) -> bool:
        """Whether vLLM serves the model on a CPU."""
        return RECORDS[FAMILIES[self.name][0]].is_served and not is_served_on_gpus_only(
            family_config(self.name).to_dict()
        )

    @property
    def tells_experts(self) -> bool:
        """Whether the engine tells the experts of each token, which the policy then uses."""
        return untold_experts(family_config(self.name).to_dict()) is None

    @property
    def packs(self) -> bool:
        """Whether rows are packed here: Megatron does it with Transformer Engine, on a GPU."""
        return self.backend == DTENSOR

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained."""
        return self.backend == DTENSOR or not self.has_experts

    def changes(self) -> dict[str, Any]:
        """Settings of the policy: AdamW without decay, which backends apply to different tensors."""
        changes: dict[str, Any] = {"max_total_sequence_length": 400, "logprob_batch_size": 4}
        if self.backend == DTENSOR:
            return changes | {"optimizer": torch_optimizer("AdamW", lr=RATE, eps=EPSILON, weight_decay=0.0)}
        changes |= {"lr": RATE, "adam_eps": EPSILON, "start_weight_decay": 0.0, "end_weight_decay": 0.0}
        return changes | ({"freeze_moe_router": False} if self.has_experts else {})

    def ways_to_split(self) -> dict[str, dict[str, Any]]:
        """Settings that two ranks share a model by; keys are the page's words."""
        config = family_config(self.name).to_dict()
        ways: dict[str, dict[str, Any]] = {DATA_PARALLELISM: {}}
        is_split = config["vocab_size"] % 2 == 0 and tensor_parallel_problem(config, 2, is_local=True) is None
        if self.backend == MEGATRON and is_split:
            ways[SP] = {"tensor_parallel_size": 2, "sequence_parallel": True}
            # Experts beside tensor parallelism need sequence parallelism; here they are dealt out to the same ranks.
            ways[TP] = ways[SP] | {"expert_model_parallel_size": 2} if self.has_experts else {"tensor_parallel_size": 2}
            if not self.has_experts and RECORDS[FAMILIES[self.name][0]].state_mixer == "GatedDeltaNet":
                ways[TP] = ways[SP]  # refused without
        if self.backend == DTENSOR and not split_problem(config, declared_plan(config["model_type"]), 2):
            ways[TP] = {"tensor_parallel_size": 2}
            ways[SP] = {"tensor_parallel_size": 2, "sequence_parallel": True}
        if self.backend == DTENSOR and not context_problem(
            config, 2, longest=self.changes()["max_total_sequence_length"]
        ):
            ways[CP] = {"context_parallel_size": 2}
        if self.has_experts and (self.backend != DTENSOR or not experts_problem(config, 1, 2)):
            key = "expert_parallel_size" if self.backend == DTENSOR else "expert_model_parallel_size"
            ways["expert parallelism"] = {key: 2}
        return ways

    def worker(
        self, folder: Path | None = None, process: ProcessInfo = ONE_RANK, **changes: Any
    ) -> AbstractContextManager[PolicyWorker]:
        """A worker with this model, or with that of another folder."""
        settings = make_settings(folder or self.folder, backend=self.backend, **(self.changes() | changes))
        return worker_of(settings, process)


def hf_model(folder: Path) -> Any:
    """Hugging Face's model of a folder, which has all of its tensors and no others."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return as_published(model.eval())


def plain_steps(model: Any, *first: tuple[float, dict[str, Tensor]]) -> tuple[list[float], list[float]]:
    """Take steps of plain torch with `BATCHES`; return the losses and the norms of the gradients.

    Args:
        model: Hugging Face's model, which is trained.
        first: Loss and gradients of the first batches, if they are known.
    """
    losses, norms = [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.0)
    for loss, grads in chain(first, (hf_loss_and_grads(model, batch) for batch in BATCHES[len(first) :])):
        for name, parameter in model.named_parameters():
            parameter.grad = grads[name]
        norms.append(float(torch.nn.utils.get_total_norm(grads.values())))
        losses.append(loss)
        optimizer.step()
    return losses, norms


def checkpoint_names(row: Row, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of a worker as the family's checkpoints name and divide them."""
    hub = HubNames(FAMILIES[row.name][0])
    return {own_name: part for name, tensor in tensors.items() for own_name, part in hub.divided(name, tensor)}


def scores_of(model: Any) -> Tensor:
    """Logprobs of the first batch."""
    return hf_logprobs(model, BATCHES[0]).detach()


def scores_like(worker: PolicyWorker, scores_BS: Tensor) -> None:
    """Logprobs of the first batch are these."""
    worker.prepare_for_lp_inference()
    assert_close(worker.get_logprobs(BATCHES[0]), scores_BS)


def steps(worker: PolicyWorker, batches: Sequence[Any]) -> list[TrainResult]:
    """Steps of training."""
    worker.prepare_for_training()
    return [worker.train(batch, NLL()) for batch in batches]


def trains_like_plain_torch(row: Row, root: Path, model: Any, scores_BS: Tensor) -> None:
    """Import, logprobs, gradients, two steps, a checkpoint between them, an export, and a resume bit by bit.

    Rows are packed where they can be packed; those of adapters are padded.

    Args:
        row: Of the matrix.
        root: Gets `saved`, and `hf` with the trained model.
        model: Hugging Face's model of the row's folder; is trained here.
        scores_BS: Its logprobs.
    """
    with row.worker(**({"sequence_packing": PACKING} if row.packs else {})) as worker:
        scores_like(worker, scores_BS)
        first = hf_loss_and_grads(model, BATCHES[0])
        has_gradients_of(model, row, worker, *first)
        losses, norms = plain_steps(model, first)
        results = steps(worker, BATCHES[:1])
        worker.save_checkpoint(root / "saved")
        results += steps(worker, BATCHES[1:])
        assert_close([loss for result in results for loss in result.loss], losses)
        assert_close([norm for result in results for norm in result.grad_norm], norms)
        trained = checkpoint_names(row, weights_of(worker))
        assert_close(trained, checkpoint_tensors(model))
        worker.export_hf(root / "hf")
        worker.load_checkpoint(root / "saved")
        assert steps(worker, BATCHES[1:]) == results[1:]
        assert_equal(checkpoint_names(row, weights_of(worker)), trained)
    exported = hf_model(root / "hf")
    assert_equal(checkpoint_tensors(exported), trained)
    assert not getattr(exported.config, "num_nextn_predict_layers", 0)  # whose tensors are not there


def has_gradients_of(model: Any, row: Row, worker: PolicyWorker, loss: float, grads: Mapping[str, Tensor]) -> None:
    """Loss and every gradient of the first batch are those of Hugging Face's model."""
    worker.prepare_for_training()
    found_loss, _ = worker.forward_backward(BATCHES[0], NLL())
    assert_close(found_loss, loss)
    values = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = grads[name]
    buffers = {checkpoint_name(model, name) for name, _ in model.named_buffers()}  # some are tensors of checkpoints
    found, expected = (
        {name: tensor for name, tensor in tensors.items() if name not in buffers}
        for tensors in (checkpoint_names(row, full_grads(worker)), checkpoint_tensors(model))
    )
    has_states = RECORDS[FAMILIES[row.name][0]].state_mixer is not None
    assert_close(found, expected, num_terms=2**16 if has_states else NUM_TERMS)  # of decays: sums of sums over chunks
    for name, parameter in model.named_parameters():
        parameter.data = values[name]
    worker.zero_grad()


def adapters_move_the_merged_weights(row: Row, root: Path, scores_BS: Tensor, engine: EngineProcess | None) -> None:
    """Two steps of adapters of padded rows; the worker computes, exports and refits to the engine weights with them.

    Args:
        row: Of the matrix.
        root: Gets `merged`.
        scores_BS: Logprobs of the model without them.
        engine: One that runs the model with whatever weights.
    """
    with lora_worker(row.folder, row.backend, **row.changes()) as worker:
        scores_like(worker, scores_BS)
        before = full_params(worker)
        steps(worker, BATCHES)
        after = full_params(worker)
        assert all(not torch.equal(after[name], before[name]) for name in before if ".lora_" in name)
        worker.export_hf(root / "merged")
        merged = hf_model(root / "merged")
        scores_like(worker, scores_of(merged))
        if engine is not None:
            refit(policy_of(worker), engine)
            answers_like(engine, merged)


def policy_of(worker: PolicyWorker) -> Policy:
    """The driver's side of one worker in this process."""
    return Policy(LocalWorkerGroup(worker), worker._settings)


def is_refitted(row: Row, engine: EngineProcess) -> None:
    """One step and a refit; the engine answers with the new weights and the worker's logprobs, by the same experts."""
    replay = RouterReplayConfig(enabled=row.tells_experts)
    with row.worker(router_replay=replay) as worker:
        steps(worker, BATCHES[:1])
        model = with_tensors(hf_model(row.folder), checkpoint_names(row, weights_of(worker)))
        refit(policy_of(worker), engine)
        answers = answers_like(engine, model)
        worker.prepare_for_lp_inference()
        batch = as_batch(answers)
        assert row.tells_experts == (batch.routed_experts is not None)
        logprobs = worker.get_logprobs(batch)
        for found, prompt, answer in zip(logprobs, PROMPTS, answers, strict=True):
            assert_close(torch.tensor(answer.logprobs), found[len(prompt) : len(prompt) + len(answer.token_ids)])


@torch.no_grad()
def with_tensors(model: Any, tensors: dict[str, Tensor]) -> Any:
    """A model whose parameters get other values, by the names of checkpoints."""
    places = checkpoint_tensors(model)  # views of its parameters
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        place.copy_(tensors[name])
    return model


@torch.no_grad()
def answers_like(engine: EngineProcess, model: Any) -> list[Completion]:
    """Greedy tokens are Hugging Face's, and their logprobs."""
    answers = [samples[0] for samples in engine.generate(PROMPTS, GREEDY)]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1].float()
        assert answer.token_ids == logits.argmax(-1).tolist()
        # A logprob is a difference of two numbers that have the roundings of logits.
        assert_close(torch.tensor(answer.logprobs) + logits.logsumexp(-1), logits.max(-1).values)
    return answers


def as_batch(answers: Sequence[Completion]) -> TokenBatch:
    """Prompts and answers in rows, padded; with the experts of all tokens but the last, if an engine tells them."""
    rows = [prompt + answer.token_ids for prompt, answer in zip(PROMPTS, answers, strict=True)]
    sequences = [
        SampledSequence(
            token_ids=row,
            token_mask=[0] * len(row),
            generation_logprobs=[0.0] * len(row),
            sample_mask=1.0,
            routed_experts=answer.routed_experts,
        )
        for row, answer in zip(rows, answers, strict=True)
    ]
    for row, answer in zip(rows, answers, strict=True):
        if (told := answer.routed_experts) is not None:
            assert len(told) == len(row) - 1
            is_told = (np.diff(np.sort(told.astype(np.int64))) > 0).all(-1)  # of each token and layer
            assert (is_told.all(0) | ~is_told.any(0)).all()
            assert is_told.any()
    return collate_samples(sequences, pad_id=256).as_kind(TokenBatch)


def split_over_two_ranks(process: ProcessInfo, row: Row) -> list[str]:
    """What two ranks compute together, by each way to use them; the page's words for what was seen."""
    ways = row.ways_to_split()
    for changes in ways.values():
        _is_split_like_hugging_face(row, process, **changes)
    return list(ways)


def _is_split_like_hugging_face(row: Row, process: ProcessInfo, **changes: Any) -> None:
    """Logprobs, loss and the gradients' norm, and the tensors that a refit sends."""
    model, batch = hf_model(row.folder), BATCHES[0]
    expected_loss, grads = hf_loss_and_grads(model, batch)
    with row.worker(process=process, **changes) as worker:
        mine = shard(batch, worker)
        worker.prepare_for_lp_inference()
        assert_close(worker.get_logprobs(mine), hf_logprobs(model, mine).detach())
        worker.prepare_for_training()
        loss, _ = worker.forward_backward(mine, NLL())
        assert_close(loss, expected_loss)
        assert_close(grad_norm(worker), float(torch.nn.utils.get_total_norm(grads.values())))
        worker.zero_grad()
        assert_equal(checkpoint_names(row, weights_of(worker)), checkpoint_tensors(model))
