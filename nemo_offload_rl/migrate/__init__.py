"""NeMo-RL's YAML files: `python -m nemo_offload_rl.migrate FILE -o OUT` writes one in our keys.

1. `utils.config` reads the file with what its `defaults:` name.
2. `mapping` applies the rules: `rules` and `features` are data, `conversions`
   and `data_sets` functions.
3. `fills` sets the keys that only this package has, to what NeMo-RL does; the rest is as our exemplar sets it.
4. `report` says what became of each key; a feature that is missing is one error.
"""

from nemo_offload_rl.migrate.mapping import Migration, migrate, migrate_file

__all__ = ["Migration", "migrate", "migrate_file"]
