"""`ray job submit`, as docs/guides/clusters.md has it: a real Ray head, a real job, its result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import forked_workers
import psutil
import pytest

from nemo_offload_rl.distributed.virtual_cluster import find_free_port

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).parent / "ray")
START_TIMEOUT_S = 1200
# Both sides need the cluster's token, whatever Ray keeps in the home folder.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """The address of a Ray head with a dashboard; nothing of it is left afterwards."""
    # A socket's path may have 107 characters, which a test's own folder often exceeds.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    port, dashboard_port = find_free_port(23000, 23499), find_free_port(23500, 23999)
    command = [
        RAY, "start", "--head", "--block", "--num-cpus=2", "--num-gpus=0", "--object-store-memory=268435456",
        f"--port={port}", f"--dashboard-port={dashboard_port}", f"--temp-dir={folder}", "--disable-usage-stats",
        f"--ray-client-server-port={find_free_port(22500, 22999)}",
        # That of another cluster on this machine has the default one.
        f"--dashboard-agent-listen-port={find_free_port(22000, 22249)}",
    ]  # fmt: skip
    variables = {**os.environ, **TOKEN, "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
    variables["RAY_health_check_failure_threshold"] = "100"  # of a busy machine: Ray gives up a host after 15 s
    variables |= {**forked_workers.variables(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
    log = Path(folder) / "start.log"
    with log.open("w") as sink:
        head = subprocess.Popen(command, env=variables, stdout=sink, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{dashboard_port}"
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"{address}/api/jobs/"):
            assert head.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.5)
        yield address
    finally:
        if head.poll() is None:
            for process in [*psutil.Process(head.pid).children(recursive=True), head]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=300) as reply:
            return reply.status == 200
    except HTTPError as error:
        return error.code == 401  # asks for the token, which `ray job` has
    except (URLError, ConnectionError, TimeoutError):
        return False


def submit(dashboard: str, script: list[str], timeout_s: float) -> tuple[int, str]:
    """Status and output of `ray job submit`, which shows the job's log."""
    command = [RAY, "job", "submit", "--address", dashboard, "--working-dir", ".", "--", *script]
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **TOKEN}, capture_output=True, text=True, timeout=timeout_s
        )
        # The part of Ray that starts jobs comes up a little later than the dashboard.
        if "No available agent to submit job" not in done.stderr or time.monotonic() > deadline_s:
            return done.returncode, done.stdout + done.stderr
        time.sleep(1)


def test_a_submitted_job_trains_on_the_cluster_and_its_results_are_there(
    dashboard, grpo_command, model_folder, tmp_path
):
    script = grpo_command(
        f"policy.model_name={model_folder}",
        f"logger.log_dir={tmp_path / 'run'}",
        "grpo.max_num_steps=2",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
    )
    status, output = submit(dashboard, script, timeout_s=1500)
    assert status == 0, output[-3000:]
    assert "step 2/2  reward" in output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_job_with_bad_input_fails_with_its_one_line(dashboard, grpo_command):
    status, output = submit(dashboard, grpo_command("grpo.sed=1"), timeout_s=1500)
    assert status != 0
    assert "error: grpo.sed: unknown key; did you mean grpo.seed?" in output
