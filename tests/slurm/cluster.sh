#!/usr/bin/env bash
# A SLURM cluster of two nodes on this machine for the tests, independent of any SLURM that is already configured.
#   eval "$(tests/slurm/cluster.sh start)"     prints the SLURM_CONF that its commands need
#   tests/slurm/cluster.sh stop
# Needs root, and `apt-get install -y --no-install-recommends slurm-wlm munge`.
set -euo pipefail
folder=/var/tmp/depthlm-slurm
export SLURM_CONF=$folder/slurm.conf

configure() {
  rm -rf "$folder"
  mkdir -p "$folder/state" "$folder/spool.n1" "$folder/spool.n2"
  cat >"$SLURM_CONF" <<CONF
ClusterName=depthlm
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=17000
SlurmUser=root
AuthType=auth/munge
# a requeued job waits for this long, 120 s by default
AuthInfo=cred_expire=15
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
KillWait=10
# a job of the partition urgent takes the place of one in main, which gets SIGTERM and has GraceTime to save
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MaxArraySize=101
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4 GraceTime=60
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
}

start() {
  if ! pgrep -x munged >/dev/null; then
    [ -f /etc/munge/munge.key ] || dd if=/dev/urandom of=/etc/munge/munge.key bs=1024 count=1 status=none
    mkdir -p /run/munge
    chown munge: /run/munge /etc/munge/munge.key
    chmod 400 /etc/munge/munge.key
    runuser -u munge -- /usr/sbin/munged
  fi
  if ! up; then
    stop
    configure
    /usr/sbin/slurmctld
    /usr/sbin/slurmd -N n1
    /usr/sbin/slurmd -N n2
    for _ in $(seq 60); do up && break || sleep 0.5; done
  fi
  up || { echo "cluster.sh: the two nodes did not start; see $folder/*.log" >&2; exit 1; }
  echo "export SLURM_CONF=$SLURM_CONF"
}

up() {
  [ "$(timeout 5 sinfo --noheader --states=idle,mixed,allocated --format=%D 2>/dev/null)" = 2 ]
}

stop() {
  for pid in "$folder"/*.pid; do
    [ -f "$pid" ] && kill "$(cat "$pid")" 2>/dev/null || true
  done
  sleep 1
}

case "${1:-}" in
  start | stop) "$1" ;;
  *) echo "usage: $0 start | stop" >&2; exit 2 ;;
esac
