#!/bin/bash
# Creates a Cloud TPU slice, installs llmx on all its hosts, and trains there.
#
#     export TPU_NAME=llmx TPU_ZONE=us-east5-a TPU_TYPE=v5p-32
#     scripts/cluster/tpu_vm.sh create     # a queued resource; waits until its hosts run
#     scripts/cluster/tpu_vm.sh install    # copies this commit, installs it with the extra tpu as uv.lock says
#     scripts/cluster/tpu_vm.sh train --config configs/llama3_8b.py --workdir /mnt/shared/llama3_8b
#     scripts/cluster/tpu_vm.sh log        # of the first host
#     scripts/cluster/tpu_vm.sh stop       # SIGTERM to all hosts: they save and end
#     scripts/cluster/tpu_vm.sh keep ...   # as train, and creates the slice again when it is taken
#     scripts/cluster/tpu_vm.sh delete
#
# Needs gcloud, logged in. TPU_SLICES=N (N > 1) makes N slices, TPU_SPOT=1 a preemptible slice,
# TPU_VERSION is the image. JAX finds the hosts by the TPU's metadata; nothing is set here.

set -euo pipefail

: "${TPU_NAME:?set it: the name of the TPU}" "${TPU_ZONE:?set it, for example us-east5-a}"
: "${TPU_TYPE:?set it, for example v5p-32}"
slices=${TPU_SLICES:-1}
spot=${TPU_SPOT:-0}
version=${TPU_VERSION:-v2-alpha-tpuv5}
uv_version=0.13.9
# Seconds to save after SIGTERM; more than checkpoint.grace_seconds.
grace=${LLMX_GRACE_SECONDS:-150}
# Between two looks at the state of the slice.
poll=${TPU_POLL_SECONDS:-30}

tpus() { gcloud compute tpus "$@" --zone="$TPU_ZONE"; }

# A slice alone has the name of its queued resource, several have a number each.
nodes() {
  if ((slices == 1)); then
    echo "$TPU_NAME"
  else
    for ((slice = 0; slice < slices; slice++)); do echo "$TPU_NAME-$slice"; done
  fi
}

# The command on all hosts of all slices at a time.
on_all_hosts() {
  local node pids=() failed=0
  for node in $(nodes); do
    tpus tpu-vm ssh "$node" --worker=all --command="$1" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  return "$failed"
}

state() {
  tpus queued-resources describe "$TPU_NAME" --format='value(state.state)' 2>/dev/null || echo NONE
}

create() {
  local options=(--accelerator-type="$TPU_TYPE" --runtime-version="$version")
  if ((slices == 1)); then
    options+=(--node-id="$TPU_NAME")
  else
    options+=(--node-prefix="$TPU_NAME" --node-count="$slices")
  fi
  if [[ $spot == 1 ]]; then options+=(--spot); fi
  tpus queued-resources create "$TPU_NAME" "${options[@]}"
  local now
  while now=$(state); [[ $now != ACTIVE ]]; do
    case $now in
      FAILED | SUSPENDED | NONE)
        echo "tpu_vm.sh: $TPU_NAME is $now, not ACTIVE: delete it and create it again" >&2
        return 1
        ;;
    esac
    echo "tpu_vm.sh: $TPU_NAME is $now"
    sleep "$poll"
  done
}

install() {
  local archive node
  archive=$(mktemp --suffix=.tar.gz)
  git -C "$(dirname "$0")/../.." archive --format=tar.gz --output="$archive" HEAD
  for node in $(nodes); do
    tpus tpu-vm scp "$archive" "$node:llmx.tar.gz" --worker=all
  done
  rm "$archive"
  on_all_hosts "set -e; mkdir -p llmx; tar xzf llmx.tar.gz -C llmx; cd llmx
    python3 -m pip install --user --quiet uv==$uv_version
    python3 -m uv sync --frozen --quiet --python 3.11 --extra tpu"
}

# Whether the supervisor of a host runs; its files are in the home folder's llmx.
# shellcheck disable=SC2016 # the host expands it
running='kill -0 "$(cat llmx/supervisor.pid 2>/dev/null)" 2>/dev/null'

# In the background, so that a lost connection ends nothing.
train() {
  local words
  printf -v words ' %q' "$@"
  on_all_hosts "if $running; then
      echo \"\$(hostname): a supervisor runs already: stop it first\" >&2; exit 1; fi
    cd llmx
    nohup .venv/bin/python -m llmx.runtime.supervisor --grace $grace -- \
      .venv/bin/python -m llmx.train$words >>train.log 2>&1 </dev/null &
    echo \$! >supervisor.pid"
}

# To the supervisors, which pass it on and wait for the save.
stop() {
  on_all_hosts "$running || exit 0
    kill -TERM \"\$(cat llmx/supervisor.pid)\"
    for second in \$(seq $((grace + 10))); do $running || exit 0; sleep 1; done
    echo \"\$(hostname): still running\" >&2; exit 1"
}

log() {
  tpus tpu-vm ssh "$(nodes | head -n 1)" --worker=0 --command="tail -n 100 -F llmx/train.log"
}

delete() { tpus queued-resources delete "$TPU_NAME" --force --quiet; }

# Until the first host's supervisor has ended by itself. A preempted slice is SUSPENDED.
keep() {
  if [[ $(state) == NONE ]]; then
    create
    install
  fi
  train "$@"
  while true; do
    sleep "$poll"
    case $(state) in
      ACTIVE)
        if tpus tpu-vm ssh "$(nodes | head -n 1)" --worker=0 --command="! $running"; then
          echo "tpu_vm.sh: the run has ended; 'tpu_vm.sh log' says how, delete ends the slice"
          return
        fi
        ;;
      SUSPENDING) ;;
      *)
        echo "tpu_vm.sh: $TPU_NAME was taken: creating it again"
        delete || true
        create
        install
        train "$@"
        ;;
    esac
  done
}

command=${1:-}
case $command in
  train | keep)
    if (($# < 2)); then
      echo "tpu_vm.sh: give the arguments of llmx.train after '$command'" >&2
      exit 2
    fi
    ;;
  create | install | log | stop | delete)
    if (($# > 1)); then
      echo "tpu_vm.sh: $command takes no arguments" >&2
      exit 2
    fi
    ;;
  *)
    echo "usage: tpu_vm.sh create | install | train ARGUMENTS | log | stop | keep ARGUMENTS | delete" >&2
    exit 2
    ;;
esac
shift
"$command" "$@"
