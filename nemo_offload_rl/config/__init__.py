"""Checks and converts the configuration of a run; `runs.loading` calls these in order.

1. `utils.config.load_config` reads, inherits, overrides and resolves.
2. `validate.validate_keys` checks every key by itself (pydantic, unknown keys forbidden) and makes the sections.
3. `rules.check_rules` checks what keys demand of each other.
4. `convert` adds what workers and engines read that is not one key as it stands.

`algorithms.ALGORITHMS` has the keys, rules and conversion of each algorithm.
"""
