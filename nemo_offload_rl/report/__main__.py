"""Entry of `python -m nemo_offload_rl.report`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_offload_rl.report.page import write_report
from nemo_offload_rl.utils.cli import ending_process


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of a run and print the path of the page."""
    parser = argparse.ArgumentParser(prog="nemo_offload_rl.report", description="Draw the metrics of a run.")
    parser.add_argument("run_dir", type=Path, help="run folder: logger.log_dir of the run")
    page = write_report(parser.parse_args(argv).run_dir)
    sys.stdout.write(f"{page}\n")
    return 0


if __name__ == "__main__":
    with ending_process():
        sys.exit(main())
