"""Estimates the seconds of a step by stage from operations, bytes and the rates of the machine.

The constants below were chosen by hand and by least squares for passes of single micro-batches
(benchmarks/results/pass_memory.json) and for decoding in the runs of benchmarks/results/large_model_*.json.
docs/measurements/plans.md compares the estimates with what runs took.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nemo_offload_rl.keys.dtensor import DTensorConfig
from nemo_offload_rl.keys.grpo import GrpoSectionConfig, RolloutSectionConfig
from nemo_offload_rl.keys.master import DistillationMasterConfig, DpoMasterConfig, RolloutMasterConfig
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.memory.account import Account
from nemo_offload_rl.memory.gpus import GpuRates
from nemo_offload_rl.memory.megatron_activations import offloaded_bytes_per_token
from nemo_offload_rl.memory.stages import Stage
from nemo_offload_rl.memory.transfers import Copies, copies_of_step
from nemo_offload_rl.models.families import attention_softcap, has_attention_sinks, has_sliding_window
from nemo_offload_rl.residency import BASE, PARAMS_PART, Phase
from nemo_offload_rl.utils.flops import ModelSizes

# Share of the rate of large products that the products of layers reach.
_MATRIX_SHARE = 0.82
# The same of attention, and forward passes that its backward pass is worth.
_ATTENTION_SHARE, _ATTENTION_BACKWARD = 0.5, 2.5
# Order of the norm that combines seconds of the GPU and of launches: the longer ones count, and both where they are
# alike. Fitted to micro-batches of 8 to 64 rows in `micro_batches_dtensor.json` and `micro_batches_megatron.json`.
_NORM = 4
# Small operations that the host launches for a layer: forward and backward pass.
_DTENSOR_LAUNCHES, _MEGATRON_LAUNCHES = (200, 780), (500, 420)
# The same of a rank that is alone and does without FSDP's work. Fitted to training passes of 0.6 B on two hosts whose
# launches take 6.8 and 10.1 us (`grpo_bound_dtensor.json`, `grpo_vs_peers_slow_host.json`); the forward pass's share of
# them to micro-batches of 8 rows in `micro_batches_dtensor.json`.
_ALONE_LAUNCHES = (180, 375)
# The same of layers that are not compiled, and how often they read and write their tensors more than compiled ones do.
_EAGER_LAUNCHES, _EAGER_PASSES = (460, 840), (30, 60)
# A layer of experts takes as many times more: router, sorting, exchange, grouped products.
_EXPERT_LAYER_FACTOR = 2.2
# Bytes that eager attention with soft-caps reads and writes for each score, by its operations in transformers: forward
# and backward pass.
_CAPPED_BYTES = (38, 48)
# Reads and writes of one position's logits in float32, in a forward pass; fitted to `micro_batches_dtensor.json`,
# `micro_batches_dtensor_whole_logits.json` and `micro_batches_megatron.json`.
_DTENSOR_LOGIT_PASSES, _MEGATRON_LOGIT_PASSES = 3, 5
# Bytes that a micro-batch reads and writes for each parameter in addition to activations: casts, gradients.
_DTENSOR_BYTES = {"forward": 8, "training": 28}
_MEGATRON_BYTES = {"forward": 2, "training": 14}
# A call of a worker with its exchange, batching and sums.
_CALL_S = 0.05
# Share of a pass by which offloading activations slows it even where copies are hidden.
_OFFLOAD_SHARE = 0.05
# Shares of a forward pass that recomputing modules (`selective`) takes, as docs/measurements/activations.md measured.
_SELECTIVE_SHARES = {"core_attn": 0.25, "mlp": 0.15, "moe": 0.45, "moe_act": 0.06}
# One step of decoding: the engine's own, and for each of its sequences (`generation_scheduler.json`, 12.9 s).
_DECODE_S, _DECODE_SEQUENCE_S = 1.2e-3, 6.6e-6
# The two sums over tensor-parallel ranks of an engine's layer, for each token that is decoded.
_DECODE_SUM_S = 15e-6
# Share of decoding's products that the reading of weights and cache does not hide.
_DECODE_FLOPS_SHARE = 0.2
# Sums over tensor-parallel ranks in a layer's forward pass, as bytes of the residual stream; their speed over NVLink.
_SUMS, _PEER_BYTES_PER_S = 4, 100e9
# A refit without bytes, and bytes per second of one rank's weights: in place, and gathered from several ranks.
_REFIT_S, _REFIT_BYTES_PER_S, _GATHER_BYTES_PER_S = 0.15, 130e9, 18e9
# Streamed parts reach this share of the link's speed, and this share of those that find room comes before the update.
_STREAM_SHARE = 0.85
_EARLY_SHARE = 0.5
# Copies whose memory on the host is not pinned run at this share of the link's speed.
_PAGEABLE_SHARE = 1 / 3
# Share of the copies of whole groups that a pass still waits for, since it needs its first layers at once.
_FIRST_SHARE = 0.1
# Share of the copies to the host, those of streamed states after their update included, that a refit waits for.
_LEAVING_SHARE = 0.4
_LOGIT_BYTES = 4
_BF16_BYTES = 2


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one stage of a step.

    Attributes:
        work_s: Computing, or the engine's work.
        exposed_s: Copies that nothing hides.
    """

    work_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """All seconds of the stage."""
        return self.work_s + self.exposed_s


@dataclass(frozen=True)
class Work:
    """Sequences of a step.

    Attributes:
        num_sequences: Rows that pass through the model, over all workers.
        length: Tokens of each.
        num_sampled: Tokens of each that the engine samples; 0 without an engine.
        num_updates: Optimizer steps.
    """

    num_sequences: int
    length: int
    num_sampled: int
    num_updates: int


def work_of(account: Account, length: int | None = None) -> Work:
    """Count the sequences of a step.

    Args:
        account: The run.
        length: Mean tokens of a sequence; None for the longest that the configuration allows.
    """
    cfg = account.cfg
    longest = cfg.policy.max_total_sequence_length
    length = longest if length is None else min(length, longest)
    batch = cfg.policy.train_global_batch_size
    _, section = cfg.algorithm
    if isinstance(cfg, RolloutMasterConfig) and isinstance(section, RolloutSectionConfig):
        most = cfg.policy.generation.max_new_tokens or longest
        # Prompts keep their length, so shorter sequences have shorter responses.
        sampled = max(1, min(most, longest - 1) - (longest - length))
        count = section.num_prompts_per_step * section.num_generations_per_prompt
        return Work(count, length, sampled, max(1, count // batch))
    rows = 2 if isinstance(cfg, DpoMasterConfig) else 1
    return Work(rows * batch, length, 0, 1)


def step_seconds(account: Account, rates: GpuRates, work: Work) -> Mapping[Stage, StageSeconds] | None:
    """Estimate the seconds of each stage of a step after the first; None if the model's layers are unknown."""
    if account.sizes is None or not account.shape.hidden_size:
        return None
    return _Step(account, account.sizes, rates, work).seconds()


def total_seconds(account: Account, stages: Mapping[Stage, StageSeconds]) -> float:
    """Return the seconds of a step: the sum of its stages, unless generation goes on during all but the refit.

    It does in async GRPO with engines on their own devices, unless rollouts may not be older than the weights. Engines
    on the policy's devices share its time too.
    """
    sum_s = sum(seconds.total_s for seconds in stages.values())
    cfg, (_, section) = account.cfg, account.cfg.algorithm
    ahead = section.async_grpo if isinstance(section, GrpoSectionConfig) else None
    is_ahead = ahead is not None and ahead.enabled and ahead.max_trajectory_age_steps > 0
    if not isinstance(cfg, RolloutMasterConfig) or not is_ahead or cfg.policy.generation.colocated.enabled:
        return sum_s
    generation_s = stages[Stage.GENERATION].total_s
    return max(sum_s - generation_s, generation_s + stages[Stage.REFIT].total_s)


def copying_kv_is_faster(account: Account, rates: GpuRates) -> bool:
    """Tell whether the KV cache of an interrupted response is copied to the host and back sooner than computed again.

    Estimated for a response of half the longest length; False if the model's size is unknown.
    """
    cfg, sizes = account.cfg, account.sizes
    if not isinstance(cfg, RolloutMasterConfig) or sizes is None:
        return False
    vllm, length = cfg.policy.generation.vllm_cfg, max(1, cfg.policy.max_total_sequence_length // 2)
    size = 1 if vllm.kv_cache_dtype.startswith("fp8") else _BF16_BYTES
    num_bytes = cache_bytes_per_token(account, size)  # an engine of several GPUs divides both
    copies_s = num_bytes / rates.out_bytes_per_s + num_bytes / rates.in_bytes_per_s
    return copies_s < sizes.forward_flops([length]) / length / (_MATRIX_SHARE * rates.matrix_flops)


def cache_bytes_per_token(account: Account, element_bytes: int) -> float:
    """Count the bytes of a token's keys and values in all layers."""
    shape = account.shape
    return 2.0 * (shape.num_layers or 0) * (shape.num_kv_heads or 0) * (shape.head_dim or 0) * element_bytes


class _Step:
    def __init__(self, account: Account, sizes: ModelSizes, rates: GpuRates, work: Work) -> None:
        self._account, self._cfg, self._sizes, self._rates, self._work = account, account.cfg, sizes, rates, work
        self._backend = account.cfg.policy.backend
        self._on_megatron = isinstance(self._backend, MegatronConfig)
        self._ranks_per_copy = self._backend.model_parallel.ranks_per_copy
        self._copies = copies_of_step(account)
        is_pinned = account.cfg.policy.use_pinned_optimizer_offload
        self._link_share = 1.0 if is_pinned else _PAGEABLE_SHARE

    def seconds(self) -> Mapping[Stage, StageSeconds]:
        work = {stage: self._work_s(stage) for stage in self._account.stages}
        return {stage: StageSeconds(work_s, self._exposed_s(stage, work)) for stage, work_s in work.items()}

    def _work_s(self, stage: Stage) -> float:
        policy = self._cfg.policy
        if stage is Stage.GENERATION:
            return self._generation_s()
        if stage is Stage.REFIT:
            return self._refit_s()
        if stage is Stage.UPDATE:
            return self._work.num_updates * self._update_s()
        if stage is Stage.TRAINING:
            budget = self._budget(policy.train_micro_batch_size, is_training=True)
            return self._work.num_updates * _CALL_S + self._passes_s(budget, is_training=True)
        sizes, rows = self._sizes, policy.logprob_batch_size
        if stage is Stage.TEACHER and isinstance(self._cfg, DistillationMasterConfig):
            sizes = self._account.teacher_sizes or sizes
            rows = self._cfg.teacher.logprob_batch_size
        return _CALL_S + self._passes_s(self._budget(rows, is_training=False), is_training=False, sizes=sizes)

    # -- passes ----------------------------------------------------------------------------------------------------

    def _budget(self, rows: int, *, is_training: bool) -> int:
        """Tokens of a micro-batch."""
        policy = self._cfg.policy
        for batching in (policy.sequence_packing, policy.dynamic_batching):
            if batching.enabled:
                return batching.train_mb_tokens if is_training else batching.logprob_mb_tokens
        if isinstance(self._cfg, DpoMasterConfig):
            rows *= 2
        return rows * self._work.length

    def _passes_s(self, budget: int, *, is_training: bool, sizes: ModelSizes | None = None) -> float:
        sizes, length = sizes or self._sizes, self._work.length
        copies = max(1, self._cfg.cluster.world_size // self._ranks_per_copy)
        num_rows = math.ceil(self._work.num_sequences / copies)
        rows_at_once = max(1, min(num_rows, budget // length))
        whole, rest = divmod(num_rows, rows_at_once)
        # The first micro-batch goes through all stages of a pipeline before the last stage has work.
        whole += self._backend.model_parallel.pipeline - 1
        is_packed = self._cfg.policy.sequence_packing.enabled

        def pass_s(rows: int) -> float:
            return self._pass_s(rows, rows * length if is_packed else length, is_training=is_training, sizes=sizes)

        return whole * pass_s(rows_at_once) + (pass_s(rest) if rest else 0.0)

    def _pass_s(self, num_rows: int, row_tokens: int, *, is_training: bool, sizes: ModelSizes) -> float:
        """Seconds of a micro-batch: of the GPU, and of the host that launches its kernels."""
        rates, length, shape = self._rates, self._work.length, self._account.shape
        tokens = num_rows * length
        flops_per_s = _MATRIX_SHARE * rates.matrix_flops
        head_flops = 2.0 * (shape.vocab_size or 0) * (shape.hidden_size or 0) * tokens
        all_weights_flops = 2.0 * sizes.num_active * tokens
        weight_flops = max(0.0, all_weights_flops - self._num_embeddings * head_flops)
        attention_flops = sizes.forward_flops([length] * num_rows) - all_weights_flops
        logit_passes = _MEGATRON_LOGIT_PASSES if self._on_megatron else _DTENSOR_LOGIT_PASSES
        logit_bytes = logit_passes * _LOGIT_BYTES * tokens * (shape.vocab_size or 0)
        head_s = head_flops / flops_per_s + logit_bytes / rates.memory_bytes_per_s
        weights_s, attention_s = weight_flops / flops_per_s, attention_flops / (_ATTENTION_SHARE * rates.matrix_flops)
        forwards, backwards = (1.0 + self._recomputed, 1.0) if is_training else (1.0, 0.0)
        # Frozen weights need no gradients.
        weights_s *= forwards + backwards * (1.0 if self._account.has_adapters else 2.0)
        attention_s *= (forwards + backwards * _ATTENTION_BACKWARD) * self._masked_share(length, row_tokens)
        # Whatever layers do, the head computes logits again if they are in chunks, and only then.
        computes_again = self._cfg.policy.logprob_chunk_size is not None
        heads = 3 + computes_again if is_training else 1
        compute_s = (weights_s + attention_s + heads * head_s) / self._ranks_per_copy
        bytes_each = (_MEGATRON_BYTES if self._on_megatron else _DTENSOR_BYTES)[
            "training" if is_training else "forward"
        ]
        held = sizes.num_parameters / (self._ranks_per_copy * self._expert_ranks)
        moved_s = bytes_each * held / rates.memory_bytes_per_s
        layers = sizes.num_layers / self._backend.model_parallel.pipeline
        of_forward, of_backward = self._launches
        launch_s = layers * (forwards * of_forward + backwards * of_backward) * rates.launch_s
        if shape.num_experts:
            launch_s *= _EXPERT_LAYER_FACTOR
        if self._has_capped_scores:
            scores = tokens * row_tokens * (shape.num_heads or 0) * layers / self._ranks_per_copy
            of_scores = forwards * _CAPPED_BYTES[0] + backwards * _CAPPED_BYTES[1]
            moved_s += of_scores * scores / rates.memory_bytes_per_s
        if self._is_eager:
            eager_bytes = _BF16_BYTES * tokens * layers * self._layer_width / self._ranks_per_copy
            times = forwards * _EAGER_PASSES[0] + backwards * _EAGER_PASSES[1]
            moved_s += times * eager_bytes / rates.memory_bytes_per_s
        gpu_s = compute_s + moved_s + self._exchange_s(tokens, layers, forwards, backwards)
        seconds = (gpu_s**_NORM + launch_s**_NORM) ** (1 / _NORM)
        return seconds + (self._offloading_s(tokens, seconds) if is_training else 0.0)

    @property
    def _is_eager(self) -> bool:
        """Tell whether DTensor's layers are not compiled; those of experts never are and have their own factor."""
        backend = self._backend
        return isinstance(backend, DTensorConfig) and not (backend.torch_compile or self._account.shape.num_experts)

    @property
    def _has_capped_scores(self) -> bool:
        """Tell whether DTensor's attention writes all scores, which a soft-cap changes."""
        return not self._on_megatron and attention_softcap(self._account.config) is not None

    def _masked_share(self, length: int, row_tokens: int) -> float:
        """Return how many times causal attention's products are computed: of whole rows, where masks hide some."""
        config, longest = self._account.config, self._cfg.policy.max_total_sequence_length
        has_masks = self._has_capped_scores or has_sliding_window(config, longest)
        if self._on_megatron or not has_masks or has_attention_sinks(config):
            return 1.0
        return 2 * row_tokens / length

    @property
    def _launches(self) -> tuple[int, int]:
        if self._on_megatron:
            return _MEGATRON_LAUNCHES
        if self._is_eager:
            return _EAGER_LAUNCHES
        return _ALONE_LAUNCHES if self._cfg.cluster.world_size == 1 else _DTENSOR_LAUNCHES

    @property
    def _layer_width(self) -> int:
        """Elements of a layer's tensors for each token: residual stream, queries, keys, inner activations."""
        shape = self._account.shape
        heads = (shape.num_heads or 0) + (shape.num_kv_heads or 0)
        return (shape.hidden_size or 0) + heads * (shape.head_dim or 0) + (shape.intermediate_size or 0)

    def _exchange_s(self, tokens: int, layers: float, forwards: float, backwards: float) -> float:
        """Seconds of a micro-batch's sums over tensor-parallel ranks, and of keys and values that others' rows need."""
        shape, parallel = self._account.shape, self._backend.model_parallel
        tensor, context = parallel.tensor, parallel.context
        stream_bytes = _BF16_BYTES * tokens / context * (shape.hidden_size or 0) * (tensor - 1) / tensor
        key_bytes = 2 * _BF16_BYTES * tokens * (shape.num_kv_heads or 0) * (shape.head_dim or 0) / tensor
        moved_bytes = _SUMS * stream_bytes + key_bytes * (context - 1) / context
        return (forwards + 2 * backwards) * layers * moved_bytes / _PEER_BYTES_PER_S

    def _offloading_s(self, tokens: int, pass_s: float) -> float:
        """Seconds in which a pass waits for activations that Megatron offloads: out in its first third, then in."""
        if not isinstance(self._backend, MegatronConfig) or not self._backend.fine_grained_activation_offloading:
            return 0.0
        num_bytes = tokens * offloaded_bytes_per_token(self._account.settings)
        out_s, in_s = num_bytes / self._rates.out_bytes_per_s, num_bytes / self._rates.in_bytes_per_s
        waits_s = max(0.0, out_s - pass_s / 3) + max(0.0, in_s - pass_s * 2 / 3)
        return _OFFLOAD_SHARE * pass_s + waits_s

    @property
    def _num_embeddings(self) -> int:
        """Matrices of the vocabulary's size that `ModelSizes` counts: the head, and the embedding if they differ."""
        return 1 if self._account.ties_embeddings else 2

    @property
    def _expert_ranks(self) -> int:
        backend = self._backend
        return backend.expert_model_parallel_size if isinstance(backend, MegatronConfig) else 1

    @property
    def _recomputed(self) -> float:
        """Share of a forward pass that is computed again in training."""
        backend = self._backend
        if not backend.activation_checkpointing:
            return 0.0
        if not isinstance(backend, MegatronConfig) or backend.recompute_granularity == "full":
            return 1.0
        return sum(_SELECTIVE_SHARES.get(module, 0.0) for module in backend.recompute_modules or ("core_attn",))

    def _update_s(self) -> float:
        """Read gradients, read and write parameters and states."""
        num_bytes = 2 * sum(size for name, size in self._account.groups.items() if name != BASE)
        return _CALL_S + num_bytes / self._rates.memory_bytes_per_s

    # -- the engine ------------------------------------------------------------------------------------------------

    def _generation_s(self) -> float:
        cfg = self._cfg
        if not isinstance(cfg, RolloutMasterConfig):
            return 0.0
        vllm, rates, sizes, shape = cfg.policy.generation.vllm_cfg, self._rates, self._sizes, self._account.shape
        tensor = vllm.tensor_parallel_size
        engines = max(1, self._num_engine_gpus(cfg) // tensor)
        waiting = math.ceil(self._work.num_sequences / engines)
        cache_bytes = 1 if vllm.kv_cache_dtype == "fp8" else _BF16_BYTES
        cache_each = cache_bytes_per_token(self._account, cache_bytes) * self._work.length / tensor
        most = int(cfg.policy.generation.vllm_kwargs.get("max_num_seqs") or waiting)
        if room := self._cache_room(cfg):
            most = min(most, max(1, int(room / cache_each))) if cache_each else most
        at_once = max(1, min(waiting, most))
        # Share of the experts that sequences which are decoded together choose, and that are read.
        share = 1.0
        if shape.num_experts:
            share = 1 - (1 - shape.num_active_experts / shape.num_experts) ** at_once
        num_read = sizes.num_parameters - sizes.num_in_experts + share * sizes.num_in_experts
        # 8-bit weights count as fewer bytes; their products as no faster.
        each_bytes = self._account.engine_parameter_bytes(vllm) if vllm.is_quantized else _BF16_BYTES
        weights = num_read * each_bytes / tensor
        mean_cache = at_once * cache_each * (1 - self._work.num_sampled / self._work.length / 2)
        flops = 2.0 * sizes.num_active * at_once / tensor
        read_s = (weights + mean_cache) / rates.memory_bytes_per_s + _DECODE_FLOPS_SHARE * flops / rates.matrix_flops
        sums_s = 2 * sizes.num_layers * _DECODE_SUM_S if tensor > 1 else 0.0
        token_s = read_s + sums_s + _DECODE_S + at_once * _DECODE_SEQUENCE_S
        prefill_tokens = waiting * (self._work.length - self._work.num_sampled)
        prefill_s = sizes.forward_flops([prefill_tokens // max(1, waiting)] * waiting) / tensor / rates.matrix_flops
        return prefill_s + waiting / at_once * self._work.num_sampled * token_s

    def _num_engine_gpus(self, cfg: RolloutMasterConfig) -> int:
        colocated = cfg.policy.generation.colocated
        if colocated.enabled:
            return cfg.cluster.world_size
        return cfg.cluster.num_nodes * cfg.cluster.gpus_per_node - cfg.cluster.world_size

    def _cache_room(self, cfg: RolloutMasterConfig) -> float:
        """Bytes of one GPU's part of the KV cache; 0 if it is unknown."""
        use = next((use for use in self._account.phases if use.phase is Phase.GENERATION), None)
        return max(0, use.engine_bytes - self._account.engine_weight_bytes) if use else 0

    def _refit_s(self) -> float:
        cfg = self._cfg
        if not isinstance(cfg, RolloutMasterConfig):
            return 0.0
        if not self._account.settings.sends_weights:
            return _REFIT_S
        weights = _BF16_BYTES * self._sizes.num_parameters / cfg.policy.generation.vllm_cfg.tensor_parallel_size
        rate = _GATHER_BYTES_PER_S if cfg.cluster.world_size > 1 else _REFIT_BYTES_PER_S
        return _REFIT_S + weights / rate

    # -- copies ----------------------------------------------------------------------------------------------------

    def _exposed_s(self, stage: Stage, work: Mapping[Stage, float]) -> float:
        """Seconds of copies that no other work hides."""
        copies, overlaps = self._copies[stage], self._cfg.policy.residency_overlap
        in_s = copies.in_bytes / self._rates.in_bytes_per_s / self._link_share
        out_s = copies.out_bytes / self._rates.out_bytes_per_s / self._link_share
        if not overlaps:
            return in_s + out_s
        if stage is Stage.UPDATE and copies.streamed_bytes:
            return self._streamed_update_s(copies, work[Stage.TRAINING])
        if stage in (Stage.REFIT, Stage.GENERATION):
            if stage is Stage.REFIT:
                streamed = self._copies[Stage.UPDATE]
                out_s += streamed.out_bytes / self._rates.out_bytes_per_s if streamed.streamed_bytes else 0.0
            return in_s + _LEAVING_SHARE * out_s
        return max(_FIRST_SHARE * in_s, in_s - work[stage]) + max(0.0, out_s - work[stage])

    def _streamed_update_s(self, copies: Copies, training_s: float) -> float:
        """Parts that found room came during the passes before; all go out during the passes that follow."""
        use = next(use for use in self._account.phases if use.phase is Phase.TRAINING)
        rate = _STREAM_SHARE * self._rates.in_bytes_per_s * self._link_share
        early_bytes = 0.0
        if PARAMS_PART not in self._account.plan.sizes:
            early_bytes = _EARLY_SHARE * min(max(0, use.left_bytes), copies.in_bytes, training_s * rate)
        return (copies.in_bytes - early_bytes) / rate
