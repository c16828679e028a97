"""The YAML keys `grpo.async_grpo.*`."""

from __future__ import annotations

from typing import Annotated

from nemo_offload_rl.schema import doc, section


@section
class AsyncGrpoConfig:
    """`grpo.async_grpo`: rollouts beside training."""

    enabled: Annotated[
        bool,
        doc(
            "Collect the rollouts of the next steps while a step is trained (docs/guides/async-grpo.md). Requires "
            "engines on devices of their own, `vllm_cfg.async_engine`, and "
            "`loss_fn.use_importance_sampling_correction`."
        ),
    ]
    max_trajectory_age_steps: Annotated[
        int,
        doc(
            "Steps that the policy may have been trained since the weights with which a rollout began; at most so many "
            "steps are collected ahead. 0 collects nothing ahead: one thing after the other. Left out: 1.",
            ge=0,
        ),
    ] = 1
    in_flight_weight_updates: Annotated[
        bool,
        doc(
            "New weights go to the engines in the middle of responses, which go on with them. false, or left out: each "
            "update waits until no rollout is under way."
        ),
    ] = False
    recompute_kv_cache_after_weight_updates: Annotated[
        bool,
        doc(
            "Responses that go on with new weights have their KV cache computed again; false, or left out, goes on "
            "with what the old weights computed. Not read without `in_flight_weight_updates`: a cache that no response "
            "needs is dropped in any case."
        ),
    ] = False
