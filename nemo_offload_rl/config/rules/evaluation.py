"""Rules between the keys of an evaluation."""

from nemo_offload_rl.backends.hf.model_folder import local_config
from nemo_offload_rl.config.rules.base import RuleSet, sources
from nemo_offload_rl.config.rules.rollouts import vllm_kwargs_problem
from nemo_offload_rl.keys.data import ArithmeticConfig, MixtureKeys
from nemo_offload_rl.keys.generation import engine_devices_problem
from nemo_offload_rl.keys.master import EvalMasterConfig, rules_in


def k_is_at_most_the_number_of_responses(cfg: EvalMasterConfig) -> str | None:
    """`eval.k_value` is at most `eval.num_tests_per_prompt`."""
    k, num = cfg.eval.k_value, cfg.eval.num_tests_per_prompt
    if k > num:
        return f"eval.k_value {k} is above eval.num_tests_per_prompt {num}; lower the first or raise the second"
    return None


def several_responses_are_sampled(cfg: EvalMasterConfig) -> str | None:
    """Several responses to a prompt need sampling that is not greedy."""
    num, generation = cfg.eval.num_tests_per_prompt, cfg.generation
    if num > 1 and (generation.temperature == 0 or generation.top_k == 1):
        return (
            f"eval.num_tests_per_prompt is {num}, but with generation.temperature {generation.temperature:g} and top_k "
            f"{generation.top_k} all responses to a prompt are the same; raise the temperature, or set it to 1"
        )
    return None


def prompts_leave_room_for_a_response(cfg: EvalMasterConfig) -> str | None:
    """`data.max_input_seq_length` is below `generation.vllm_cfg.max_model_len`."""
    longest, room = cfg.data.max_input_seq_length, cfg.generation.vllm_cfg.max_model_len
    if longest >= room:
        return (
            f"data.max_input_seq_length {longest} leaves no room for a response in generation.vllm_cfg.max_model_len "
            f"{room}; lower the first or raise the second"
        )
    return None


def evaluated_environments_exist(cfg: EvalMasterConfig) -> str | None:
    """Every environment that data name is a key of `env`."""
    for place, source in sources(cfg.data.validation, "data.validation"):
        name = source.env_name or cfg.data.default.env_name
        if name not in cfg.env:
            return (
                f"{place} is scored by the environment {name}, which env does not have (keys: {', '.join(cfg.env)}); "
                f"add env.{name}, or set data.default.env_name"
            )
    return None


def every_row_is_evaluated(cfg: EvalMasterConfig) -> str | None:
    """An evaluation uses all rows, of `arithmetic` the held-out ones; a mixture has a weight for each data set."""
    mixture = cfg.data.validation
    if (
        isinstance(mixture, MixtureKeys)
        and mixture.weights is not None
        and len(mixture.weights) != len(mixture.datasets)
    ):
        return "data.validation.weights does not have a number for each data set, and all rows are used; set it to null"
    for place, source in sources(cfg.data.validation, "data.validation"):
        if isinstance(source, ArithmeticConfig):
            if not source.holdout:
                return f"{place}.holdout is 0, but only held-out problems are evaluated; set it to their number"
        elif source.split_validation_size > 0:
            return f"{place}.split_validation_size is not 0, but all rows are evaluated; set it to 0"
    return None


def evaluating_engine_fits_its_devices(cfg: EvalMasterConfig) -> str | None:
    """The engine's tensor-parallel size divides the devices of a host."""
    size, per_node = cfg.generation.vllm_cfg.tensor_parallel_size, cfg.cluster.workers_per_node
    return engine_devices_problem(size, per_node, section="generation")


def evaluation_kwargs_are_allowed(cfg: EvalMasterConfig) -> str | None:
    """`generation.vllm_kwargs` obeys the rules of `policy.generation.vllm_kwargs`."""
    return vllm_kwargs_problem(cfg.generation.vllm_kwargs, "generation.vllm_kwargs")


def evaluation_serves_no_endpoint(cfg: EvalMasterConfig) -> str | None:
    """An evaluation serves nothing over HTTP."""
    if cfg.generation.vllm_cfg.expose_http_server:
        return (
            "generation.vllm_cfg.expose_http_server is true, but an evaluation asks the engine itself and serves "
            "nothing over HTTP; set it to false"
        )
    return None


def only_evaluating_engines_in_8_bits_keep_layers(cfg: EvalMasterConfig) -> str | None:
    """`use_deep_gemm` and keys of layers that stay in bfloat16 need `vllm_cfg.precision: fp8`."""
    problem = cfg.generation.vllm_cfg.problem_of_precision
    return None if problem is None else f"generation.vllm_cfg.{problem}"


def evaluating_engines_share_out_experts_over_their_devices(cfg: EvalMasterConfig) -> str | None:
    """`expert_parallel_size` is 1 or the engine's tensor-parallel size."""
    problem = cfg.generation.vllm_cfg.problem_of_experts
    return None if problem is None else f"generation.vllm_cfg.{problem}"


def quantized_folders_are_not_quantized_again(cfg: EvalMasterConfig) -> str | None:
    """`generation.vllm_cfg.precision: fp8` needs a folder with weights of 16 or 32 bits."""
    generation = cfg.generation
    config = local_config(generation.model_name, {}) or {}
    if not generation.vllm_cfg.is_quantized or not config.get("quantization_config"):
        return None
    return (
        f"generation.vllm_cfg.precision is fp8, but the weights of {generation.model_name} are quantized already "
        "(quantization_config in its config.json), and vLLM evaluates them as they are; set precision to bfloat16"
    )


EVAL_RULES: RuleSet[EvalMasterConfig] = RuleSet((), rules_in(__name__, EvalMasterConfig))
