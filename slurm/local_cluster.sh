#!/usr/bin/env bash
# A Slurm of two nodes on this machine, to try the scripts on: Debian or Ubuntu, as root, no systemd needed.
#
#   bash slurm/local_cluster.sh up     # install, configure, start; prints the line that points sbatch at it
#   bash slurm/local_cluster.sh try    # evaluate a tiny target, the prompts shared out over both nodes, as a job
#   bash slurm/local_cluster.sh down   # stop it; the packages and munged stay
#
# Everything it writes is under LOCAL_SLURM (/var/tmp/outrider-slurm). A Slurm this machine may already run is left
# alone: the configuration is a file of its own, and so are the ports. The nodes are two slurmd on one host. They
# claim 2 GPUs and 16 cores each, whatever is there, so that jobs which ask for GPUs start on any machine.
set -euo pipefail

root=${LOCAL_SLURM:-/var/tmp/outrider-slurm}
export SLURM_CONF=$root/slurm.conf
nodes=(local1 local2)

configure() {
  rm -rf "$root/state"
  mkdir -p "$root/state" "$root/spool" "$root/log"
  cat >"$SLURM_CONF" <<EOF
ClusterName=outrider
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool/%n
SlurmctldPidFile=$root/slurmctld.pid
SlurmdPidFile=$root/slurmd-%n.pid
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/slurmd-%n.log
# a requeued job waits as long as its credential lives
AuthInfo=cred_expire=5
KillWait=5
# without cgroups, and without accounting
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
NodeName=local1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=16818 CPUs=16 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
NodeName=local2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=16819 CPUs=16 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
EOF
  echo "Name=gpu File=/dev/null,/dev/zero" >"$root/gres.conf" # a GPU must be some device; nothing opens these
  echo "CgroupPlugin=cgroup/v1" >"$root/cgroup.conf"
}

start() {
  if ! munge -n 2>/dev/null | unmunge >/dev/null 2>&1; then
    install -d -o munge -g munge -m 0755 /run/munge
    runuser -u munge -- munged
  fi
  slurmctld
  for node in "${nodes[@]}"; do
    slurmd -N "$node"
  done
  for _ in $(seq 60); do
    [ "$(sinfo --noheader --format=%D --states=idle 2>/dev/null)" = "${#nodes[@]}" ] && return
    sleep 0.5
  done
  echo "the nodes did not come up; see $root/log" >&2
  sinfo >&2
  exit 1
}

stop() {
  scancel --state=PENDING,RUNNING,SUSPENDED --user="$(id -un)" 2>/dev/null || true
  for file in "$root"/slurmd-*.pid "$root/slurmctld.pid"; do
    [ -f "$file" ] || continue
    pid=$(<"$file")
    kill "$pid" 2>/dev/null || continue
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
  done
}

case ${1:-} in
up)
  if ! command -v slurmctld slurmd sbatch munged >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge
  fi
  stop
  configure
  start
  sinfo
  echo "export SLURM_CONF=$SLURM_CONF"
  ;;
try)
  # Without GPUs the two processes work on the CPU. A rehearsal leaves the tiny target.
  options=(method=prompt_lookup prompts=python_stdlib num_prompts=2 prompt_chars=100 max_new_tokens=16)
  evaluate-checkpoint target=any "${options[@]}" debug=true "out_dir=$root/rehearsal"
  rm -rf "$root/shared"
  OMP_NUM_THREADS=1 sbatch --wait --nodes 2 --output "$root/shared.log" slurm/evaluate.sbatch "${options[@]}" \
    "target=$root/rehearsal-debug/tiny_models/target" dtype=float32 "out_dir=$root/shared" ||
    { cat "$root/shared.log" >&2 && exit 1; }
  cat "$root/shared/report.md"
  ;;
down) stop ;;
*)
  echo "usage: bash slurm/local_cluster.sh up|try|down" >&2
  exit 2
  ;;
esac
