"""The report of a run: `python -m nemo_offload_rl.report RUN_DIR`.

1. `figures`: reads metrics.jsonl of the run folder; one table has the metrics of each figure.
2. `plot` draws figures as SVG.
3. `page`: write RUN_DIR/report/index.html, a file with everything inside.
"""

from nemo_offload_rl.report.figures import Metrics, read_metrics
from nemo_offload_rl.report.page import write_report

__all__ = ["Metrics", "read_metrics", "write_report"]
