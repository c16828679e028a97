#!/bin/bash
# One Ray cluster for one run on Slurm: a head on the first node, a worker on each other node, then the run.
#
#   sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh \
#     examples/run_grpo.py --config examples/configs/grpo_math_1B.yaml cluster.num_nodes=2 cluster.gpus_per_node=8
#
# The arguments are what would follow `python`. Submit from the repository's folder, which every node must see, like the
# model, logger.log_dir and checkpointing.checkpoint_dir. PYTHON names another interpreter than .venv/bin/python.
#
# CONTAINER=IMAGE runs it all in an image of this repository's Dockerfile (pyxis and enroot; a .sqsh file or a registry's
# name), with the folders of CONTAINER_MOUNTS (FROM:TO,...) in it; paths of the arguments are then the image's.
#
# Five minutes before the time limit, and when the job is preempted, the run saves and ends, and the job is queued again;
# it goes on from its newest checkpoint. A step and a save have to fit in that time: change --signal below, and
# checkpointing.grace_s of the run, if they need longer.
#SBATCH --job-name=nemo_offload_rl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$PWD}"

container=()
if [[ -n "${CONTAINER:-}" ]]; then
  container=(--container-image="$CONTAINER" --container-workdir=/opt/nemo_offload_rl)
  [[ -z "${CONTAINER_MOUNTS:-}" ]] || container+=(--container-mounts="$CONTAINER_MOUNTS")
  python=${PYTHON:-/opt/nemo_offload_rl/.venv/bin/python}
else
  python=$(realpath -s "${PYTHON:-.venv/bin/python}")
fi
ray="$(dirname "$python")/ray"
port=${RAY_PORT:-6379}
start_timeout_s=${RAY_START_TIMEOUT_S:-300}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
# Debian's /etc/hosts gives a host's own name the address 127.0.1.1, which other nodes do not reach.
addresses=$(srun --nodes=1 --ntasks=1 -w "$head" \
  bash -c 'echo $(hostname --ip-address) $(hostname --all-ip-addresses)')
head_address=${addresses%% *}
for address in $addresses; do
  [[ $address == 127.* || $address == *:* ]] || { head_address=$address; break; }
done

# Every node of the cluster needs the same token; Ray reads it from here.
RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
# The first workers of a GPU run must not see a GPU that Ray did not give them.
RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1
# Ray serves its metrics on all interfaces, without a token.
RAY_enable_metrics_collection=${RAY_enable_metrics_collection:-0}
# By default Ray's workers wait for every other process of a node.
RAY_worker_niceness=${RAY_worker_niceness:-0}
export RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO RAY_enable_metrics_collection RAY_worker_niceness

start_node() { # NODE ARGUMENTS: runs for as long as the node is up
  local node=$1 step=""
  shift
  (
    trap 'trap - TERM; kill $step 2>/dev/null || true; wait; exit 143' TERM
    for try in 1 2; do # Ray gives up after 30 s, too soon for a node that is slow at first
      srun --nodes=1 --ntasks=1 --overlap -w "$node" "${container[@]}" \
        "$ray" start --block --disable-usage-stats "$@" &
      step=$!
      ! wait "$step" || exit 0
      ((try == 1 && SECONDS < start_timeout_s)) || exit 1
      echo "Ray did not start on $node, and is started once more"
    done
  ) &
}

here=() # what runs a command on the first node, where this script runs, or in its container
[[ -z "${CONTAINER:-}" ]] || here=(srun --nodes=1 --ntasks=1 --overlap -w "$head" "${container[@]}")

# The steps end with the job; asking them to end lets Ray write its logs.
trap 'trap - EXIT; jobs -p | xargs -r kill 2>/dev/null || true; wait' EXIT

start_node "$head" --head --node-ip-address="$head_address" --port="$port" ${RAY_HEAD_ARGS:-}
for node in "${nodes[@]:1}"; do
  start_node "$node" --address="$head_address:$port" ${RAY_WORKER_ARGS:-}
done

export RAY_ADDRESS="$head_address:$port"
"${here[@]}" "$python" - "${#nodes[@]}" "$start_timeout_s" <<'PYTHON'
import sys, time, socket, os

num_nodes, deadline_s = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
host, port = os.environ["RAY_ADDRESS"].rsplit(":", 1)
while True:
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        break
    except OSError as error:
        if time.monotonic() > deadline_s:
            sys.exit(f"error: the head node did not start at {host}:{port} ({error}); see the log of this job")
        time.sleep(1)
import ray

ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
while (present := sum(node["Alive"] for node in ray.nodes())) < num_nodes:
    if time.monotonic() > deadline_s:
        sys.exit(f"error: {present} of {num_nodes} nodes joined the Ray cluster; see the log of this job")
    time.sleep(1)
PYTHON

# Slurm sends USR1 before the limit and TERM at preemption or `scancel`, to this shell alone.
stopped_by=""
"${here[@]}" "$python" "$@" &
run=$!
trap 'stopped_by=USR1; kill -USR1 "$run"' USR1
trap 'stopped_by=TERM; kill -TERM "$run"' TERM
status=0
wait "$run" || status=$?
while [[ -n "$stopped_by" ]] && kill -0 "$run" 2>/dev/null; do # a signal has ended the wait, not the run
  status=0
  wait "$run" || status=$?
done
if [[ "$stopped_by" == USR1 && "$status" != 0 ]]; then # 0: it was the last step
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
