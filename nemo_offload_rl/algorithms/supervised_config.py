"""The YAML keys `sft.*` and `dpo.*`."""

from __future__ import annotations

from typing import Annotated

from nemo_offload_rl.schema import doc, section


@section
class SupervisedSectionConfig:
    """What `sft` and `dpo` have in common: epochs, steps and validation."""

    max_num_epochs: Annotated[int, doc("Stop after this number of passes over the training data.", ge=1)]
    max_num_steps: Annotated[int, doc("Stop after this number of steps, if the epochs do not end first.", ge=1)]
    val_period: Annotated[int, doc("Steps from one validation to the next; 0 disables validation.", ge=0)]
    val_batches: Annotated[int, doc("Maximum number of batches in a validation; 0 for all.", ge=0)]
    val_global_batch_size: Annotated[int, doc("Sequences (DPO: pairs) of each validation batch.", ge=1)]
    val_micro_batch_size: Annotated[
        int,
        doc(
            "Sequences (DPO: pairs) in one forward pass of one worker; not read where micro-batches are made "
            "by tokens.",
            ge=1,
        ),
    ]
    val_at_start: Annotated[bool, doc("Validate before the first step.")]
    val_at_end: Annotated[bool, doc("Validate after the last step.")]
    seed: Annotated[int, doc("Seed of data order and initial state.", ge=0)]

    @property
    def validates(self) -> bool:
        """Whether there is any validation in a run."""
        return self.val_at_start or self.val_at_end or self.val_period > 0


@section
class SftSectionConfig(SupervisedSectionConfig):
    """`sft`: supervised fine-tuning. The loss is the mean of minus the logprob of the assistant's tokens."""

    only_unmask_final: Annotated[
        bool, doc("The loss counts only the last turn of the assistant, not every turn of a conversation.")
    ]


@section
class DpoSectionConfig(SupervisedSectionConfig):
    """`dpo`: direct preference optimization (arXiv 2305.18290). One step makes one update."""

    reference_policy_kl_penalty: Annotated[
        float, doc("Beta: how much a change of the log-ratio to the reference counts.", gt=0)
    ]
    preference_loss_weight: Annotated[float, doc("Weight of the preference loss.", ge=0)]
    preference_average_log_probs: Annotated[
        bool, doc("Log-ratios are means over a response's tokens, not sums, so that length has no effect.")
    ]
    label_smoothing: Annotated[
        float, doc("Share of pairs taken to be labelled the wrong way round (conservative DPO).", ge=0, lt=0.5)
    ]
    sft_loss_weight: Annotated[
        float, doc("Weight of minus the logprob of the chosen response, added to the loss; 0 for none.", ge=0)
    ]
    sft_average_log_probs: Annotated[bool, doc("That term is a mean over a response's tokens, not a sum.")]
    precompute_reference_logprobs: Annotated[
        bool,
        doc(
            "Compute the reference's logprobs of all data once, before the first step, from the policy itself, and "
            "save them beside the checkpoints; no copy of the reference is kept. false computes them in each step."
        ),
    ]
