"""Templates of batch jobs, run by bash as batch systems run them."""

import fcntl
import os
import signal
import subprocess

import pytest
from conftest import PATIENCE, ROOT, wait_for

pytestmark = pytest.mark.skipif(not (ROOT / ".venv" / "installed").exists(),
                                reason="the jobs use .venv, which make builds")


def submit(system: str, argv: list[str], folder=ROOT, array=False, **more) -> subprocess.Popen:
    """Run the job script as `sbatch` or `bsub` would; with `array`, as task 9 of 8."""
    environment = {**os.environ, **more}
    if system == "slurm":
        command = ["bash", "jobs/slurm.sh", *argv]
        environment |= {"SLURM_SUBMIT_DIR": str(folder)}
        if array:
            environment |= {"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_COUNT": "8"}
    else:
        command = ["bash"]
        environment |= {"LS_SUBCWD": str(folder), "COMMAND": " ".join(argv), "LSB_JOBINDEX": "0"}
        if array:
            environment |= {"LSB_JOBINDEX": "9", "LSB_JOBINDEX_END": "8"}
    with open(ROOT / "jobs" / "lsf.sh") as script:
        return subprocess.Popen(command, cwd=ROOT, env=environment, text=True,
                                stdin=script if system == "lsf" else subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("system", ["slurm", "lsf"])
def test_signal_and_words_reach_the_script(system, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import signal, sys, time\n"
                      "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
                      "print(sys.argv[1:], flush=True)\n"
                      "open(sys.argv[2], 'w').close()\n"  # last, because the test waits for it
                      "time.sleep(100)\n")
    ready = tmp_path / "a b"
    job = submit(system, [str(script), "--name", f"'{ready}'" if system == "lsf" else str(ready)])
    wait_for(ready.exists, job)
    job.send_signal(signal.SIGTERM)
    output, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 128 + signal.SIGTERM
    assert str(["--name", str(ready)]) in output and "Traceback" not in errors


@pytest.mark.parametrize("system", ["slurm", "lsf"])
def test_job_of_an_array_does_its_shard(system, tmp_path):
    """It also waits while another job builds .venv."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    with open(ROOT / "Makefile") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        job = submit(system, [str(script), "a"], array=True)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(3)
    output, _ = job.communicate(timeout=PATIENCE)
    assert "['a', '--shard', '9/8']" in output


@pytest.mark.slow
@pytest.mark.parametrize("system", ["slurm", "lsf"])
def test_several_processes_are_started_by_torchrun_and_have_time_to_stop(system, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, signal, sys, time\n"
                      "asked = []\n"
                      "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
                      "open(sys.argv[1] + '_ready' + os.environ['RANK'], 'w').close()\n"
                      "if os.environ['RANK'] == '0':\n"
                      "    while not os.path.exists(sys.argv[1] + '_ready1'):\n"
                      "        time.sleep(0.1)\n"
                      "    print(os.environ['WORLD_SIZE'], 'processes', flush=True)\n"
                      "while not asked:\n"
                      "    time.sleep(0.1)\n"
                      "time.sleep(35)\n"  # by default, torchrun kills after 30 seconds
                      "open(sys.argv[1] + os.environ['RANK'], 'w')\n")
    job = submit(system, [str(script), str(tmp_path / "saved")], PROCESSES="2")
    assert "2 processes\n" in job.stdout  # after the output of make
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=PATIENCE)
    assert job.returncode
    assert len(list(tmp_path.glob("saved?"))) == 2
