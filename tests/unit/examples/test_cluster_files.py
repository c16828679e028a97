"""Launch files for clusters: the Slurm script runs with stand-ins for Slurm's commands, the manifest has its schema."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import psutil
import pytest
import yaml
from jsonschema import Draft202012Validator

from nemo_offload_rl.distributed.virtual_cluster import find_free_port
from nemo_offload_rl.runs.loading import load_grpo_config

ROOT = Path(__file__).parents[3]
SLURM = ROOT / "examples/cluster/slurm.sh"
KUBERAY = ROOT / "examples/cluster/kuberay.yaml"
KUBERNETES = "1.37"

REPORT = """\
import os, ray
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
print("nodes", sum(node["Alive"] for node in ray.nodes()), "CPUs", int(ray.cluster_resources()["CPU"]))
"""


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path):
    """Slurm's commands as this machine can run them: every node is here."""
    commands = tmp_path / "bin"
    commands.mkdir()
    stand_in(commands, "scontrol", "printf 'node1\\nnode2\\n'\n")
    stand_in(commands, "srun", 'while [[ "$1" == -* ]]; do [[ "$1" == -w ]] && shift; shift; done\nexec "$@"\n')
    stand_in(commands, "hostname", "echo 127.0.0.1\n")
    return {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "PYTHON": sys.executable,
        "RAY_PORT": str(find_free_port(24000, 24999)),
        "RAY_HEAD_ARGS": "--num-cpus=3 --num-gpus=0 --object-store-memory=100000000 --include-dashboard=false",
        "RAY_WORKER_ARGS": "--num-cpus=2 --num-gpus=0 --object-store-memory=100000000",
        "RAY_START_TIMEOUT_S": "300",
        "RAY_prestart_worker_first_driver": "0",  # the report needs no worker
    }


def run_script(environment, *arguments):
    """Status and output; nothing of the cluster is left."""
    process = subprocess.Popen(
        ["bash", str(SLURM), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=1500)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    left = [p for p in psutil.process_iter() if process.pid in _session_of(p)]
    psutil.wait_procs(left, timeout=1500)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return process.returncode, output


def _session_of(process: psutil.Process) -> tuple[int, ...]:
    try:
        return (os.getsid(process.pid),)
    except ProcessLookupError:
        return ()


@pytest.mark.processes
def test_the_slurm_script_makes_one_cluster_of_all_nodes_and_runs_the_command_on_it(slurm, tmp_path):
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    status, output = run_script(slurm, str(script))
    assert status == 0, output
    assert "nodes 2 CPUs 5" in output


STOPPED = """\
import os, signal, sys, time

def leave(number, frame):
    print("the run hears", signal.Signals(number).name, flush=True)
    time.sleep(0.2)  # saves
    sys.exit(128 + number)

for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, leave)
os.kill(int(os.environ["SHELL_PID"]), getattr(signal, sys.argv[1]))
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("name", "status"), [("SIGUSR1", 138), ("SIGTERM", 143)])
def test_a_signal_to_the_slurm_script_reaches_the_run_whose_end_is_awaited(slurm, tmp_path, name, status):
    (tmp_path / "run.py").write_text(STOPPED)
    # Ray is not needed for this: it "runs" until it is stopped, and what waits for it waits for its three starts.
    starts = f"{tmp_path}/starts"
    ray = (
        f'echo "$@" >> {starts}\n[[ "$*" == *--head* || -e {tmp_path}/slow ]] || {{ touch {tmp_path}/slow; exit 1; }}\n'
    )
    wait = f'if [[ "$1" == - ]]; then until [[ $(wc -l < {starts}) == 3 ]]; do sleep 0.05; done; exit 0; fi\n'
    stand_in(tmp_path, "ray", f"{ray}exec sleep 600\n")
    stand_in(tmp_path, "python", f'{wait}SHELL_PID=$PPID exec {sys.executable} "$@"\n')
    stand_in(tmp_path / "bin", "scontrol", "[[ $1 == requeue ]] && echo requeued $2 || printf 'node1\\nnode2\\n'\n")
    variables = {**slurm, "PYTHON": str(tmp_path / "python"), "SLURM_JOB_ID": "77"}
    ended, output = run_script(variables, str(tmp_path / "run.py"), name)
    assert ended == status, output
    assert output.count(f"the run hears {name}") == 1
    assert output.count("Ray did not start on node2, and is started once more") == 1
    assert ("requeued 77" in output) is (name == "SIGUSR1")


@pytest.mark.processes
def test_with_a_container_every_command_of_the_run_is_in_it(slurm, tmp_path):
    log = tmp_path / "srun.log"
    srun = f"""
        echo "$@" >> {log}
        [[ "$*" != *hostname* ]] || echo 127.0.1.1 fe80::1 10.1.2.3 172.17.0.1
        # The run's end stops both nodes, which are started in the background.
        [[ "$*" != *run_grpo.py* ]] || until [ "$(grep -c "ray start --block" {log})" = 2 ]; do sleep 0.05; done
    """
    stand_in(tmp_path / "bin", "srun", srun)
    container = {"CONTAINER": "/shared/image.sqsh", "CONTAINER_MOUNTS": "/shared:/shared"}
    status, output = run_script({**slurm, "PYTHON": "/opt/python", **container}, "examples/run_grpo.py", "a=b")
    assert status == 0, output
    address, *others = log.read_text().splitlines()
    assert "hostname" in address and "--container-image" not in address
    assert all("--container-image=/shared/image.sqsh" in line and "=/shared:/shared" in line for line in others)
    assert sorted(line.split()[-1] for line in others if "/opt/python - " in line) == ["300"]
    head, worker = sorted(
        (line for line in others if "/opt/ray start --block" in line), key=lambda line: "--head" not in line
    )
    assert "--node-ip-address=10.1.2.3 " in head and "--address=10.1.2.3:" in worker
    assert sum(line.endswith("/opt/python examples/run_grpo.py a=b") for line in others) == 1


def closed(required: tuple[str, ...] = (), **properties: object) -> dict:
    return {
        "type": "object", "properties": properties, "required": list(required), "additionalProperties": False
    }  # fmt: skip


def listed(items: dict) -> dict:
    return {"type": "array", "items": items, "minItems": 1}


def rayjob_schema() -> dict:
    """Fields of KubeRay's RayJob (ray.io/v1) that a manifest like ours may have, and no others, without those of pods.

    Source: ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go of KubeRay.
    """
    text, whole, flag = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
    texts, pod = {"type": "object", "additionalProperties": text}, {"type": "object"}
    head = closed(("template", "rayStartParams"), template=pod, rayStartParams=texts, serviceType=text)
    workers = closed(
        ("groupName", "template", "rayStartParams"),
        groupName=text,
        template=pod,
        rayStartParams=texts,
        replicas=whole,
        minReplicas=whole,
        maxReplicas=whole,
        numOfHosts=whole,
    )
    cluster = closed(
        ("headGroupSpec",),
        rayVersion=text,
        headGroupSpec=head,
        workerGroupSpecs=listed(workers),
        enableInTreeAutoscaling=flag,
    )
    job = closed(
        ("entrypoint", "rayClusterSpec"),
        jobId=text,
        entrypoint=text,
        rayClusterSpec=cluster,
        backoffLimit=whole,
        activeDeadlineSeconds=whole,
        shutdownAfterJobFinishes=flag,
        ttlSecondsAfterFinished=whole,
        runtimeEnvYAML=text,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        suspend=flag,
    )
    return closed(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "ray.io/v1"},
        kind={"const": "RayJob"},
        metadata=closed(("name",), name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}, labels=texts),
        spec=job,
    )


def test_the_kuberay_manifest_fits_the_fields_of_a_rayjob():
    manifest = yaml.safe_load(KUBERAY.read_text())
    validator = Draft202012Validator(rayjob_schema())
    assert [error.message for error in validator.iter_errors(manifest)] == []
    manifest["spec"]["rayClusterSpec"]["workerGroupSpec"] = []
    assert not validator.is_valid(manifest)


def pods_of(manifest: dict) -> list[dict]:
    """What the operator asks Kubernetes for: a pod of each template."""
    cluster = manifest["spec"]["rayClusterSpec"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **template} for template in templates]


def test_the_pods_of_the_kuberay_manifest_have_the_schema_of_kubernetes():
    head, worker = pods_of(yaml.safe_load(KUBERAY.read_text()))
    for pod in (head, worker):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    worker["spec"]["containers"][0]["securityContext"]["capability"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="capability"):
        kubernetes_validate.validate(worker, KUBERNETES, strict=True)


def test_the_manifest_asks_kubernetes_for_what_its_entrypoint_asks_ray_for():
    spec = yaml.safe_load(KUBERAY.read_text())["spec"]
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    _, script, option, config, *overrides = shlex.split(spec["entrypoint"])
    assert (ROOT / script).is_file() and option == "--config"
    cluster = load_grpo_config(ROOT / config, overrides).cluster
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert cluster.num_nodes == group["replicas"] == group["minReplicas"]
    assert cluster.gpus_per_node == int(limits["nvidia.com/gpu"])
    for pod in (spec["rayClusterSpec"]["headGroupSpec"], group):
        hook = pod["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[-1].endswith(spec["jobId"])
        assert pod["template"]["spec"]["terminationGracePeriodSeconds"] == 300
        volumes = {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
        mounted = {mount["name"] for mount in pod["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert volumes == mounted
