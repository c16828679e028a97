"""A GRPO run that scores no training batch before the policy has come back; run by a test as a process of its own.

`python tests/support/waiting_environment.py ARGUMENTS`: those of examples/run_grpo.py.
"""

from __future__ import annotations

import sys
import threading

from one_process_grpo import run_in_this_process

from nemo_offload_rl.environments.math import ArithmeticEnvironment
from nemo_offload_rl.policy.policy import Policy

LIMIT_S = 300
came_back = threading.Event()
prepare, score = Policy.prepare_for_lp_inference, ArithmeticEnvironment.step


def prepare_and_tell(policy):
    """The real call."""
    reports = prepare(policy)
    came_back.set()
    return reports


def wait_and_score(environment, responses):
    """The real scores, later."""
    if not came_back.wait(LIMIT_S):
        sys.exit("the policy did not come back beside the scoring")
    came_back.clear()
    return score(environment, responses)


if __name__ == "__main__":
    Policy.prepare_for_lp_inference = prepare_and_tell
    ArithmeticEnvironment.step = wait_and_score
    run_in_this_process()
