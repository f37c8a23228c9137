#!/usr/bin/env bash
# What every batch script here shares; sourced by them. No hyper-parameters: those are in the configuration.
#
# DPPO_ACTIVATE         file to source first, e.g. a virtual environment's bin/activate
# DPPO_LOGS             directory of the logs, one file a node (default: logs/JOB_ID)
# DPPO_CONTAINER_IMAGE  run inside this image (srun's pyxis options), with DPPO_CONTAINER_MOUNTS

if [[ -n ${DPPO_ACTIVATE:-} ]]; then
  # shellcheck source=/dev/null
  source "$DPPO_ACTIVATE"
fi

# Where the ranks meet: the first node of the job, a port of the job's own.
MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export MASTER_ADDR MASTER_PORT

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export PYTHONUNBUFFERED=1
# megatron-core overlaps communication with computation only in this launch order.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

EXIT_RESUME=75 # dppo was asked to stop and has saved

# Run a command as the job's tasks, pass Slurm's warning on, and put the job back where it can go on later.
run_tasks() {
  local logs=${DPPO_LOGS:-logs/$SLURM_JOB_ID} step code passed_on=0
  local options=(--label --output="$logs/%N.log" --open-mode=append)
  # Not --kill-on-bad-exit: the first rank that has saved would end those that are about to. A rank that died
  # leaves the others waiting; they are ended after --wait seconds.
  options+=(--kill-on-bad-exit=0 --wait=50)
  if [[ -n ${DPPO_CONTAINER_IMAGE:-} ]]; then
    options+=(--container-image="$DPPO_CONTAINER_IMAGE" --container-mounts="${DPPO_CONTAINER_MOUNTS:-$PWD:$PWD}")
    options+=(--container-workdir="$PWD")
  fi
  mkdir -p "$logs"
  srun "${options[@]}" "$@" &
  step=$!
  # srun hands USR1 to every task. Preemption's TERM reaches the tasks from Slurm itself: it is only survived here.
  trap 'passed_on=1; kill -USR1 "$step" 2>/dev/null' USR1
  trap 'passed_on=1' TERM
  wait "$step"
  code=$?
  while ((passed_on)); do # a signal ends wait, not the tasks
    passed_on=0
    wait "$step"
    code=$?
  done
  if ((code == EXIT_RESUME)); then
    echo "saved; job $SLURM_JOB_ID goes back to the queue"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$code"
}
