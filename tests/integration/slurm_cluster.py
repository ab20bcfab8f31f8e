"""A SLURM cluster of loopback nodes for tests: its own folder, ports, keys and daemons, all of which end with it."""
import contextlib
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import tempfile

import harness

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel")


def missing():
    """What is not installed here, in words; empty if a cluster can be started."""
    gone = [name for name in PROGRAMS if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None]
    if gone:
        return f"SLURM is not installed ({', '.join(gone)} missing)"
    return "" if os.geteuid() == 0 else "a SLURM cluster of loopback nodes needs root"


def _free_ports(count):
    """Ports in a row, since slurm.conf names those of the nodes as a range."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        taken = []
        try:
            for port in range(first, first + count):
                listener = socket.socket()
                taken.append(listener)
                listener.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for listener in taken:
                listener.close()
    raise harness.Failure(f"no {count} free ports in a row")


class Cluster:
    def __init__(self, folder, num_nodes):
        self.folder = folder
        self.num_nodes = num_nodes
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
        self._daemons = []

    def run(self, *command, expect=0, timeout=60):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout, env=self.env)
        harness.check(expect is None or done.returncode == expect,
                      f"{' '.join(map(str, command))} exited with {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}")
        return done.stdout

    def logs(self):
        texts = [f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(texts)

    def state(self, job):
        """"RUNNING", "COMPLETED", ...; slurmctld keeps ended jobs for MinJobAge seconds."""
        for word in self.run("scontrol", "show", "job", job).split():
            if word.startswith("JobState="):
                return word.removeprefix("JobState=")
        raise harness.Failure(f"scontrol does not know job {job}")

    def wait(self, job, states, seconds=240):
        try:
            harness.wait_until(lambda: self.state(job) in states, seconds, f"job {job} to be {' or '.join(states)}")
        except harness.Failure as failure:
            raise harness.Failure(f"{failure}; it is {self.state(job)}\n{self.logs()}") from None
        return self.state(job)

    def _daemon(self, name, *command):
        log = open(self.folder / f"{name}.out.log", "wb")
        self._daemons.append(subprocess.Popen([str(word) for word in command], stdout=log, stderr=subprocess.STDOUT, env=self.env,
                                              start_new_session=True))
        log.close()

    def start(self):
        folder = self.folder
        os.chmod(folder, 0o755)
        (folder / "spool").mkdir()
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        first = _free_ports(self.num_nodes + 1)
        last = self.num_nodes - 1
        nodes = f"n[0-{last}]" if last else "n0"
        ports = f"[{first + 1}-{first + self.num_nodes}]" if last else str(first + 1)
        # An address of its own for each, so that the roles of a run over several nodes can use the same ports.
        addresses = "127.0.0.11" if self.num_nodes == 1 else f"127.0.0.1[1-{self.num_nodes}]"
        (folder / "slurm.conf").write_text(f"""
ClusterName=prl
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1,requeue_delay=0
JobRequeue=1
MinJobAge=3600
SlurmdTimeout=10
KillWait=5
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
GresTypes=gpu
NodeName={nodes} NodeHostname=localhost NodeAddr={addresses} Port={ports} Sockets=1 CoresPerSocket=8 ThreadsPerCore=1 CPUs=8 Gres=gpu:8 State=UNKNOWN
PartitionName=cluster Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
        gpus = folder / "gpus"
        gpus.mkdir()
        for i in range(8):
            (gpus / f"gpu{i}").touch()
        (folder / "gres.conf").write_text(f"NodeName={nodes} Name=gpu File={gpus}/gpu[0-7]\n")
        self._daemon("munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
                     f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed")
        harness.wait_until((folder / "munge.socket").exists, 30, "munged")
        self._daemon("slurmctld", "slurmctld", "-D", "-f", folder / "slurm.conf")
        for i in range(self.num_nodes):
            (folder / "spool" / f"n{i}").mkdir()
            self._daemon(f"slurmd{i}", "slurmd", "-D", "-f", folder / "slurm.conf", "-N", f"n{i}")

        def all_idle():
            if any(daemon.poll() is not None for daemon in self._daemons):
                raise harness.Failure(f"a daemon of the cluster ended\n{self.logs()}")
            done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, timeout=30, env=self.env)
            return done.stdout.split() == ["idle"] * self.num_nodes
        try:
            harness.wait_until(all_idle, 90, "the nodes to be idle")
        except harness.Failure as failure:
            raise harness.Failure(f"{failure}\n{self.logs()}") from None

    def stop(self):
        with contextlib.suppress(Exception):
            self.run("scancel", "--user=root", expect=None, timeout=10)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=20)


@contextlib.contextmanager
def cluster(num_nodes=2):
    reason = missing()
    if reason:
        raise harness.Skip(reason)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="prl-slurm-", dir="/tmp"))
    slurm = Cluster(folder, num_nodes)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
        shutil.rmtree(folder, ignore_errors=True)
