"""A small real Slurm cluster: a controller and two nodes on this machine, in a temporary folder.

It is started by the tests of submission, or by hand::

    python tests/cluster/slurm.py bash      # a shell in which sbatch, squeue and scontrol use it

It needs Debian's packages ``slurm-wlm`` and ``munge`` and root permissions. It has its own keys,
sockets, ports and state, and does not affect an installed Slurm. There is no accounting. The second
node declares a GPU that does not exist, so that jobs that request a GPU run only there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
NODES = ("node1", "node2")
CORES, MEMORY_MB = 4, 4000  # declared by each node, but not enforced
SECONDS_TO_START = 60
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmctldPort={controller_port}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool_%n
SlurmdParameters=config_overrides
SlurmdDebug=info
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=100000
ReturnToService=2
KillWait=60
MinJobAge=300
GresTypes=gpu
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=UNLIMITED State=UP
"""


def why_not() -> str:
    """Return the reason why a cluster cannot be started here; "" if it can."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if lacking:
        return f"there is no {lacking[0]}: install slurm-wlm and munge to test submission"
    return "" if os.geteuid() == 0 else "Slurm's daemons must be started as root"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Context manager that starts the daemons and stops them at the end.

    Args:
        folder: folder for all files of the daemons.

    Yields:
        The environment in which Slurm's commands use this cluster.
    """
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    with contextlib.ExitStack() as stack:
        _start_munge(folder, stack, environment)
        _configure(folder)
        for command in (["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in NODES)):
            _start(command, folder, stack, environment)
        _wait(lambda: _nodes(environment).count("idle") == len(NODES), folder)
        stack.callback(_end_jobs, environment)
        yield environment


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _start_munge(folder: Path, stack: contextlib.ExitStack, environment: dict[str, str]) -> None:
    """Start the daemon with which Slurm's programs authenticate each other."""
    own = folder / "munge"
    own.mkdir(mode=0o700)
    (own / "key").write_bytes(secrets.token_bytes(1024))
    (own / "key").chmod(0o400)
    _start(["munged", "--foreground", "--force", f"--key-file={own}/key",
            f"--socket={folder}/munge.socket", f"--pid-file={own}/pid", f"--seed-file={own}/seed",
            f"--log-file={own}/log"], folder, stack, environment)
    _wait((folder / "munge.socket").exists, folder)


def _configure(folder: Path) -> None:
    controller, *ports = _free_ports(1 + len(NODES))
    nodes = [f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} "
             f"CPUs={CORES} RealMemory={MEMORY_MB}" for name, port in zip(NODES, ports)]
    nodes[-1] += " Gres=gpu:1"
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(
        host=socket.gethostname(), folder=folder, controller_port=controller,
        nodes="\n".join(nodes), names=",".join(NODES)))
    (folder / "gres.conf").write_text(f"NodeName={NODES[-1]} Name=gpu File=/dev/null\n")


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(command: list[str], folder: Path, stack: contextlib.ExitStack,
           environment: dict[str, str]) -> None:
    with open(folder / f"{'_'.join(command).replace('/', '_')[:40]}.said", "wb") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
    stack.callback(_stop, process)


def _stop(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_jobs(environment: dict[str, str]) -> None:
    """Cancel every job and wait for the end of its processes, which would outlive the daemons."""
    subprocess.run(["scancel", "--user=root", "--signal=KILL", "--full"], env=environment)
    subprocess.run(["scancel", "--user=root"], env=environment)
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end and subprocess.run(
            ["squeue", "--noheader"], env=environment, capture_output=True).stdout.strip():
        time.sleep(0.2)


def _nodes(environment: dict[str, str]) -> list[str]:
    """Return the state of each node; empty while the controller does not answer."""
    answer = subprocess.run(["sinfo", "--noheader", "--Node", "--format=%t"], env=environment,
                            capture_output=True, text=True)
    return answer.stdout.split()


def _wait(condition, folder: Path) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while not condition():
        if time.monotonic() > end:
            said = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
                             for path in sorted(folder.glob("*.said")))
            raise TimeoutError(f"Slurm has not started:\n{said}")
        time.sleep(0.2)


if __name__ == "__main__":
    if why_not():
        sys.exit(why_not())
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        os.chmod(path, 0o755)  # other users must be able to reach munged's socket
        with cluster(Path(path)) as found:
            sys.exit(subprocess.run(sys.argv[1:] or ["bash"], env=found).returncode)
