"""`python -m nemo_offload_rl.migrate FILE [-o OUT]`, or `--count FOLDER`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.utils.cli import ending_process


def main(argv: Sequence[str] | None = None) -> int:
    """Print the outcome of each key, and write our YAML; or count the files of a folder that load."""
    parser = argparse.ArgumentParser(
        prog="python -m nemo_offload_rl.migrate",
        description="Turn a YAML file of NeMo-RL (GRPO, SFT, DPO, distillation, evaluation) into one of this package.",
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a configuration of NeMo-RL's")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="where to write ours; an error if it exists")
    parser.add_argument("--count", type=Path, metavar="FOLDER", help="count the files of a folder that load")
    parsed = parser.parse_args(argv)
    if (parsed.file is None) == (parsed.count is None):
        raise ConfigError("give one file, or --count and a folder")
    if parsed.count is not None:
        return _count(parsed.count)
    return _migrate(parsed.file, parsed.output)


def _count(folder: Path) -> int:
    from nemo_offload_rl.migrate.count import count_folder

    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give one with NeMo-RL's YAML files")
    sys.stdout.write(f"{count_folder(folder).render()}\n")
    return 0


def _migrate(file: Path, output: Path | None) -> int:
    from nemo_offload_rl.migrate.count import check
    from nemo_offload_rl.migrate.mapping import migrate_file
    from nemo_offload_rl.migrate.report import render_yaml

    if output is not None and output.exists():
        raise ConfigError(f"{output} exists; give the name of a new file")
    migration = migrate_file(file)
    sys.stdout.write(f"{migration.report.render()}\n")
    migration.check()
    check(migration.algorithm, migration.config)
    if output is not None:
        try:
            output.write_text(render_yaml(migration.config, migration.report, file.name), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{output} cannot be written: {error.strerror}; give another place") from error
        script = f"examples/run_{migration.algorithm}.py"
        sys.stdout.write(f"\nwritten: {output}; start it with python {script} --config {output}\n")
    return 0


if __name__ == "__main__":
    with ending_process():
        sys.exit(main())
