"""The YAML keys `sft.*` and `dpo.*`."""

from typing import Annotated

from nemo_offload_rl.keys.section import doc, section, value_of


@section
class SupervisedSectionConfig:
    """Keys of both `sft` and `dpo`: epochs, steps and validation."""

    max_num_epochs: Annotated[int, doc("Maximum number of passes over the training data.", ge=1)] = 1
    max_num_steps: Annotated[int, doc("Maximum number of steps; the epochs may end the run earlier.", ge=1)] = 1000000
    val_period: Annotated[int, doc("Steps between validations; 0: only `val_at_start` and `val_at_end` count.", ge=0)]
    val_batches: Annotated[int, doc("Maximum number of batches per validation; 0 for all.", ge=0)] = 8
    val_global_batch_size: Annotated[int, doc("Sequences (DPO: pairs) per validation batch.", ge=1)] = 32
    val_micro_batch_size: Annotated[
        int,
        doc(
            "Sequences (DPO: pairs) per worker in one forward pass; ignored with `policy.sequence_packing` and "
            "`policy.dynamic_batching`.",
            ge=1,
        ),
    ] = 1
    val_at_start: Annotated[bool, doc("Validate before the first step.")] = True
    val_at_end: Annotated[bool, doc("Validate after the last step.")] = True
    seed: Annotated[int, doc("Seed for data order and initialization.", ge=0)] = 42

    @property
    def validates(self) -> bool:
        """Whether the run validates at all."""
        return self.val_at_start or self.val_at_end or self.val_period > 0


@section
class SftSectionConfig(SupervisedSectionConfig):
    """`sft`: supervised fine-tuning. The loss is the mean negative logprob of the assistant's tokens."""

    only_unmask_final: Annotated[
        bool, doc("The loss counts only the last assistant turn of a conversation, not all of them.")
    ] = False


@section
class DpoSectionConfig(SupervisedSectionConfig):
    """`dpo`: direct preference optimization (arXiv 2305.18290). One step makes one update."""

    reference_policy_kl_penalty: Annotated[float, doc("Beta: the factor of the log-ratio to the reference.", gt=0)] = (
        0.05
    )
    preference_loss_weight: Annotated[float, doc("Weight of the preference loss.", ge=0)] = 1.0
    preference_average_log_probs: Annotated[
        bool, doc("Average log-ratios over a response's tokens instead of summing them, so that length does not count.")
    ] = False
    label_smoothing: Annotated[
        float, doc("Share of pairs that are assumed to have swapped labels (cDPO).", ge=0, lt=0.5)
    ] = 0.0
    sft_loss_weight: Annotated[
        float, doc("Weight of the chosen response's negative logprob, added to the loss; 0 for none.", ge=0)
    ] = 0.0
    sft_average_log_probs: Annotated[bool, doc("Average that term over a response's tokens instead of summing it.")] = (
        value_of("${.preference_average_log_probs}")
    )
    precompute_reference_logprobs: Annotated[
        bool,
        doc(
            "Compute the reference's logprobs of all data once, before the first step, and save them in the checkpoint "
            "folder. The run then keeps no copy of the reference. false computes them in each step."
        ),
    ] = False
