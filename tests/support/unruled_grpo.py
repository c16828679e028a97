"""A GRPO run for which no rule knows what vLLM leaves out of a family, so that the first refit finds it.

`unruled_grpo.py ARGUMENTS`: with a GPU as examples/run_grpo.py, without one as one_process_grpo.py.
"""

from __future__ import annotations

import torch
from one_process_grpo import main, run_in_this_process  # pyright: ignore[reportAttributeAccessIssue]

from nemo_offload_rl.models import served
from nemo_offload_rl.utils.cli import ending_process

if __name__ == "__main__":
    served.SETTINGS = {}
    if torch.cuda.is_available():
        with ending_process():
            main()
    else:
        run_in_this_process()
