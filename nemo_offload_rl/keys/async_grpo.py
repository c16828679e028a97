"""The YAML keys `grpo.async_grpo.*`."""

from __future__ import annotations

from typing import Annotated

from nemo_offload_rl.keys.section import doc, section


@section
class AsyncGrpoConfig:
    """`grpo.async_grpo`: rollouts during training."""

    enabled: Annotated[
        bool,
        doc(
            "Generate the rollouts of later steps while the current step trains (docs/guides/async-grpo.md). "
            "Requires engines on their own devices, `vllm_cfg.async_engine`, and "
            "`loss_fn.use_importance_sampling_correction`."
        ),
    ]
    max_trajectory_age_steps: Annotated[
        int,
        doc(
            "Maximum number of steps that the policy may have trained since the weights with which a rollout began; "
            "at most this many steps are collected ahead. 0 collects nothing ahead: generation and training "
            "alternate. If omitted: 1.",
            ge=0,
        ),
    ] = 1
    in_flight_weight_updates: Annotated[
        bool,
        doc(
            "Update the engines' weights in the middle of responses, which continue with the new weights. false or "
            "omitted: each update waits until no rollout is in progress."
        ),
    ] = False
    recompute_kv_cache_after_weight_updates: Annotated[
        bool,
        doc(
            "Recompute the KV cache of responses that continue with new weights; false or omitted keeps the old "
            "weights' KV cache. Ignored without `in_flight_weight_updates`: a cache that no response needs is "
            "always dropped."
        ),
    ] = False
