"""Checks and converts the configuration of a run; `runs.loading` takes these steps, in order.

1. `utils.config.load_config` reads, inherits, overrides and resolves.
2. `validate.validate_keys` checks every key by itself (pydantic, unknown keys forbidden) and makes the sections.
3. `rules.check_rules` checks the rules between keys.
4. `convert` adds the settings of workers and engines.

`algorithms.ALGORITHMS` has the keys, rules and conversion of each algorithm.
"""
