"""Rules of SFT and DPO."""

from nemo_offload_rl.config.rules.base import DATA_RULES, data_parallel_size, sources
from nemo_offload_rl.errors import share_problem
from nemo_offload_rl.keys.master import DpoMasterConfig, SftMasterConfig, rules_in

type _Config = SftMasterConfig | DpoMasterConfig


def longest_row_fits_the_policy(cfg: _Config) -> str | None:
    """The longest sequence of the data fits the policy."""
    longest, limit = cfg.data.max_input_seq_length, cfg.policy.max_total_sequence_length
    if longest > limit:
        return (
            f"data.max_input_seq_length {longest} is above policy.max_total_sequence_length {limit}, so a long row "
            "would not fit; lower the first or raise the second"
        )
    return None


def validation_batch_divides_over_workers(cfg: _Config) -> str | None:
    """The validation batch divides over the data-parallel workers."""
    name, section = cfg.algorithm
    size = data_parallel_size(cfg)
    return share_problem(f"{name}.val_global_batch_size", section.val_global_batch_size, size) if size else None


def data_sets_name_no_environment(cfg: _Config) -> str | None:
    """No data set names an environment; only runs with rollouts have environments."""
    for where, section in (("train", cfg.data.train), ("validation", cfg.data.validation)):
        for place, source in sources(section, f"data.{where}"):
            if source.env_name is not None:
                return f"{place}.env_name is set, but nothing is generated that an environment could score; remove it"
    return None


def pairs_fit_a_micro_batch_made_by_tokens(cfg: DpoMasterConfig) -> str | None:
    """A micro-batch that is formed by tokens holds a pair of the longest responses."""
    longest = cfg.policy.max_total_sequence_length
    batchings = {"sequence_packing": cfg.policy.sequence_packing, "dynamic_batching": cfg.policy.dynamic_batching}
    for name, section in batchings.items():
        if section.enabled and section.train_mb_tokens < 2 * longest:
            return (
                f"policy.{name}.train_mb_tokens {section.train_mb_tokens} is below twice "
                f"policy.max_total_sequence_length {longest}, but the two responses of a pair go into one micro-batch; "
                f"raise it to {2 * longest} or more"
            )
    return None


def the_loss_has_a_term(cfg: DpoMasterConfig) -> str | None:
    """At least one term of the loss has a weight."""
    if cfg.dpo.preference_loss_weight == 0 and cfg.dpo.sft_loss_weight == 0:
        return (
            "dpo.preference_loss_weight and dpo.sft_loss_weight are both 0, so there is nothing to learn; raise one of "
            "them"
        )
    return None


RULES = (*DATA_RULES, *rules_in(__name__, _Config))
DPO_RULES = rules_in(__name__, DpoMasterConfig)
