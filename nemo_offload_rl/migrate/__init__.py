"""Converts NeMo-RL's YAML files: `python -m nemo_offload_rl.migrate FILE -o OUT` writes one with our keys.

1. `utils.config` reads the file and its `defaults:`.
2. `mapping` applies `rules`, which are data, and the functions of `algorithm`, `policy` and `data_sets`.
3. Keys that only this package has are set to what NeMo-RL does (`rules.FILLS`), or as in our exemplar.
4. `report` lists the outcome of each key; missing features are one error.
"""

from nemo_offload_rl.migrate import algorithm, data_sets, policy  # noqa: F401 (they register conversions)
from nemo_offload_rl.migrate.mapping import Migration, migrate, migrate_file

__all__ = ["Migration", "migrate", "migrate_file"]
