"""A Slurm cluster of one node on this machine, in a folder of its own. Needs root, slurmctld and slurmd."""

import os
import shutil
import socket
import subprocess
import time

LIMIT = 600  # seconds: it ends a hang, and is far above what a busy machine needs
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/{tracking}
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MailProg=/bin/true
SlurmctldPort={port}
SlurmdPort={next_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes={host} PriorityTier=1 Default=YES MaxTime=INFINITE State=UP GraceTime=0
PartitionName=high Nodes={host} PriorityTier=10 MaxTime=INFINITE State=UP
"""


def missing():
    """Why there can be none, or an empty text."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    programs = [name for name in ("slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    return f"there is no {programs[0]}: apt-get install slurmctld slurmd slurm-client" if programs else ""


class SlurmNode:
    def __init__(self, folder, tracking="cgroup"):
        self.folder, host = folder, socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        config = CONFIG.format(folder=folder, host=host, tracking=tracking, port=16817, next_port=16818)
        (folder / "slurm.conf").write_text(config)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        self.daemons = [subprocess.Popen(["slurmctld", "-D", "-i"]), subprocess.Popen(["slurmd", "-D", "-N", host])]

    def run(self, *command):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT).stdout

    def wait_until(self, condition):
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, self.describe()
            assert self.runs(), "a daemon of Slurm has ended"
            time.sleep(0.2)

    def runs(self):
        return all(daemon.poll() is None for daemon in self.daemons)

    def is_idle(self):
        result = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, check=False)
        return set(result.stdout.split()) == {"idle"}

    def describe(self):
        logs = [(self.folder / name).read_text()[-1500:] for name in ("slurmctld.log", "slurmd.log")]
        return "\n".join([*logs, self.run("squeue")])

    def close(self):
        for daemon in self.daemons:
            daemon.terminate()
            daemon.wait(LIMIT)
        os.environ.pop("SLURM_CONF")
