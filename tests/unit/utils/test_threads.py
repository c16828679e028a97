from __future__ import annotations

import subprocess
import sys

import pytest

from nemo_offload_rl.utils.threads import in_thread

# Both leave a thread that never ends: a rollout that is still scored as the run ends, and an agent that was given up.
SCRIPT = """
import threading
from nemo_offload_rl.algorithms.rollout_pool import RolloutPool
from nemo_offload_rl.data.loader import LookaheadLoader, ShuffledLoader
from nemo_offload_rl.environments.agents import AgentEnvironment, AgentTask
from nemo_offload_rl.environments.grading_pool import TimedOut
from nemo_offload_rl.targets import UserCode

begun = threading.Event()

def draw(*part):
    begun.set()
    threading.Event().wait()

loader = ShuffledLoader(range(2), batch_size=2, shuffle=False, seed=0)
pool = RolloutPool(draw, LookaheadLoader(loader), order="data", max_age=0, first_step=1, last_step=1, most_at_once=1)
pool.begin_due(0, 0)
begun.wait()
pool.close()

class Endless:
    def run(self, task):
        threading.Event().wait()

agents = AgentEnvironment(UserCode("env.endless.target", Endless()), num_workers=0, timeout_s=0.1, name="env.endless")
task = AgentTask(base_url="http://localhost", api_key="", model="", question="", answer="", metadata={}, messages=[])
assert agents.run([task]) == [TimedOut()]
print("ends")
"""


def test_a_process_ends_although_a_users_code_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


def test_a_thread_returns_its_result_or_raises_its_error() -> None:
    assert in_thread(int, "7").result() == 7
    with pytest.raises(ValueError, match="invalid literal"):
        in_thread(int, "seven").result()
