"""Many runs, on this machine or on a Slurm cluster. The same command again finishes what is missing.

    python benchmark/sweep.py benchmark/studies/small_mujoco.toml --jobs 2
    python benchmark/sweep.py benchmark/studies/mujoco.toml --only 'Ant__*_small__1' 'Ant__*_small__2'
    python benchmark/sweep.py benchmark/studies/mujoco.toml --slurm="--partition=gpu --gpus=1 --time=24:00:00" --jobs 50

A study (see benchmark/studies) has a run for each environment, seed and variant. `{env_id}` in its flags is the
environment, `{eaude}` the sparsity with which the variant `eaude` has ended there with the same seed: it is waited for.
"""

import dataclasses
import fcntl
import fnmatch
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Args:
    study: tyro.conf.Positional[Path]  # TOML file
    jobs: int = 1  # runs at a time
    only: tuple[str, ...] = ()  # only runs with such names, {env}__{script}__{variant}__{seed}; * is any text
    runs_dir: Path = Path("runs")  # folder in which the study gets a folder of its own
    slurm: str | None = None  # options of sbatch: with them, the runs are submitted to Slurm
    dry_run: bool = False  # print the state and the command of every run, and do nothing
    worker: Path | None = None  # internal: the list of runs of a Slurm array, of which this is a task


def fail(message: str):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- Studies ---------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Run:
    folder: Path  # {env}__{script}__{variant}__{seed}, with command, lock, log, exit code and the script's own folder
    template: str  # script and flags, where {variant} stands for a sparsity
    needed: Path | None  # folder of the run that ends with that sparsity

    def is_ready(self) -> bool:
        return self.needed is None or is_done(self.needed)

    def command(self) -> str:
        if self.needed is None or not self.is_ready():
            return self.template
        return re.sub(r"{\w+}", f"{final_sparsity(self.needed):.4g}", self.template)


def load_study(path: Path, runs_dir: Path) -> list[Run]:
    study, root, runs = tomllib.loads(path.read_text()), runs_dir.resolve() / path.stem, []
    variants, env_ids, seeds = study["variants"], study["env_ids"], study["seeds"]

    def folder(variant: str, env_id: str, seed: int) -> Path:
        return root / f"{env_id}__{variants[variant].split('.py')[0]}__{variant}__{seed}"

    for seed, env_id, variant in itertools.product(seeds, env_ids, variants):
        script, _, flags = variants[variant].partition(" ")
        command = f"{script} --env-id {env_id} --seed {seed} {study.get('flags', '')} {flags}"
        command = command.replace("{env_id}", env_id)
        other = re.search(r"{(\w+)}", command)
        needed = folder(other[1], env_id, seed) if other else None
        runs.append(Run(folder(variant, env_id, seed), " ".join(command.split()), needed))
    return runs


def read_about(policy: Path) -> dict:
    """What a policy file says of itself."""
    try:
        with np.load(policy) as arrays:
            return json.loads(str(arrays["about"]))
    except Exception:  # damage has many kinds
        fail(f"{policy} is damaged; without its folder the run starts again")


def is_done(folder: Path) -> bool:
    """A run that is under way, or was stopped, has a checkpoint, or its policy is of an earlier step."""
    for policy in folder.glob("*/policy.npz"):
        about = read_about(policy)
        if about["step"] == about["args"]["total_timesteps"] and not policy.with_name("checkpoint.npz").exists():
            return True
    return False


def final_sparsity(folder: Path) -> float:
    """Of the target that a finished run has left, on MuJoCo the mean of its two critics."""
    (policy,) = folder.glob("*/policy.npz")
    sparsities = read_about(policy)["sparsity"]
    return float(np.mean([sparsity for name, sparsity in sparsities.items() if name != "actor"]))


def state_of(folder: Path) -> str:
    """done, failed, running (a process holds the lock), interrupted or missing"""
    if is_done(folder) or not (folder / "lock").exists():
        return "done" if is_done(folder) else "missing"
    with open(folder / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "running"
    code = (folder / "exit_code").read_text() if (folder / "exit_code").exists() else "killed"
    return "interrupted" if code in ("killed", "130", "143", "-15", "-9") else "failed"


# ---- One run ---------------------------------------------------------------------------------------------------------
def start(run: Run, cores: list[int]) -> subprocess.Popen | None:
    """None if another process is at work on it. The lock is the run's own, so it outlives this process."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / "lock", "a") as lock, open(run.folder / "log", "a") as log:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        (run.folder / "command").write_text(run.command())
        print(f"on {len(cores)} cores", file=log, flush=True)  # results depend on the number of XLA's threads
        script, *flags = shlex.split(run.command())
        flags += ["--runs-dir", str(run.folder)]
        for own in [path.parent for path in run.folder.glob("*/args.json")]:
            if (own / "checkpoint.npz").exists():
                flags = ["--resume", str(own)]
            else:  # it was ended before its first checkpoint, or writes none
                shutil.rmtree(own)
        command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, str(ROOT / script), *flags]
        threads = " --xla_cpu_multi_thread_eigen=false" if len(cores) == 1 else ""
        env = os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + threads}
        options = {"stdout": log, "stderr": log, "pass_fds": [lock.fileno()], "start_new_session": True}
        return subprocess.Popen(command, env=env, **options)


def has_ended(run: Run, process: subprocess.Popen) -> bool:
    if process.poll() is not None:
        (run.folder / "exit_code").write_text(str(process.returncode))
    return process.returncode is not None


def last_line(run: Run) -> str:
    return (run.folder / "log").read_text().strip().splitlines()[-1]


def note_signals() -> list[int]:
    received = []  # handlers only note: a signal is dealt with where it cannot come in between
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: received.append(signum))
    return received


# ---- This machine ----------------------------------------------------------------------------------------------------
def run_here(waiting: list[Run], jobs: int) -> None:
    """`jobs` runs at a time, each on cores of its own. After a signal all of them write a checkpoint and end."""
    cores = sorted(os.sched_getaffinity(0))
    if jobs > len(cores):
        fail(f"--jobs {jobs}: each run needs a core of its own, and there are {len(cores)}")
    if jobs > 1:  # on a GPU that runs share, the first would take 75 % of the memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    free = [cores[i::jobs][: len(cores) // jobs] for i in range(jobs)]  # as many for each
    running, received, shown = {}, note_signals(), time.monotonic()  # running: {run: (process, cores)}
    while True:
        ready = [] if received else [run for run in waiting if run.is_ready()]
        if not ready and not running:
            return
        for run in ready[: len(free)]:
            waiting.remove(run)
            process = start(run, free[0])
            print(f"{run.folder.name}: {'started' if process else 'another process is at work on it'}", flush=True)
            if process:
                running[run] = process, free.pop(0)
        for run, (process, its_cores) in list(running.items()):
            if received:
                process.terminate()
            if has_ended(run, process):
                del running[run]
                free.append(its_cores)
                print(f"{run.folder.name}: {state_of(run.folder)}", flush=True)
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            for run in running:
                print(f"{run.folder.name}: {last_line(run)}", flush=True)
        time.sleep(0.2)


# ---- Slurm -----------------------------------------------------------------------------------------------------------
def slurm(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        fail(f"{command[0]}: {getattr(error, 'stderr', None) or error}")


def names_in_queue(folder: Path) -> set[str]:
    """A job has the name of the list of its runs, and a task is an index in it."""
    names = set()
    for line in slurm("squeue", "-h", "-r", "--me", "-o", "%j %K").splitlines():
        job, task = line.rsplit(maxsplit=1)
        if (folder / f"{job}.json").exists():
            names.add(json.loads((folder / f"{job}.json").read_text())[int(task)])
    return names


def submit(args: Args, runs: list[Run], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    queued = names_in_queue(folder)
    runs = [run for run in runs if run.is_ready() and run.folder.name not in queued]
    for batch in [runs[i : i + 1_000] for i in range(0, len(runs), 1_000)]:  # more tasks an array may not have
        path = folder / f"{args.study.stem}-{time.time_ns()}.json"
        path.write_text(json.dumps([run.folder.name for run in batch]))  # before sbatch: a task may start at once
        worker = [sys.executable, __file__, args.study, "--runs-dir", args.runs_dir, "--worker", path]
        options = [f"--job-name={path.stem}", f"--array=0-{len(batch) - 1}%{args.jobs}", f"--output={folder}/%x_%a.log"]
        options += ["--requeue", "--open-mode=append", "--signal=B:TERM@120", *shlex.split(args.slurm)]
        print(slurm("sbatch", *options, "--wrap", "exec " + shlex.join(map(str, worker))).strip())


def work(run: Run) -> None:
    """A task of an array. After a warning the run is put back into the queue, and goes on when its turn comes."""
    received, process = note_signals(), start(run, sorted(os.sched_getaffinity(0)))
    if process is None:
        fail(f"another process is at work on {run.folder}")
    while not has_ended(run, process):
        if received:
            process.terminate()  # Slurm does not tell the children of a batch script
        time.sleep(0.2)
    task = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    state = slurm("squeue", "-h", "-j", task, "-o", "%T").strip()  # no longer "RUNNING" if it was cancelled
    if received and state == "RUNNING" and state_of(run.folder) == "interrupted":
        slurm("scontrol", "requeue", task)
    sys.exit(process.returncode)


def main(args: Args) -> None:
    try:
        runs = load_study(args.study, args.runs_dir)
    except OSError as error:
        fail(f"{args.study}: {error.strerror}")
    except KeyError as error:
        fail(f"{args.study} is not a study: it has no {error}")
    except ValueError as error:
        fail(f"{args.study} is not a study: {error}")
    if args.jobs < 1:
        fail(f"--jobs must be at least 1, not {args.jobs}")
    if args.worker:
        name = json.loads(args.worker.read_text())[int(os.environ["SLURM_ARRAY_TASK_ID"])]
        work(next(run for run in runs if run.folder.name == name))
    if args.only:
        runs = [run for run in runs if any(fnmatch.fnmatch(run.folder.name, pattern) for pattern in args.only)]
    if not runs:
        fail(f"{args.study} has no runs" + (f" {' '.join(args.only)}" if args.only else ""))
    for run in runs:
        before = (run.folder / "command").read_text() if (run.folder / "command").exists() else run.command()
        if run.is_ready() and before != run.command():
            fail(f"{run.folder.name} was started with other flags\n  then: {before}\n  now:  {run.command()}")
    if args.dry_run:
        for run in runs:
            print(f"{state_of(run.folder)}: python {run.command()}")
        return
    unfinished = [run for run in runs if state_of(run.folder) not in ("done", "running")]
    queued, folder = set(), runs[0].folder.parent / "slurm"
    if args.slurm is None:
        run_here(unfinished, args.jobs)
    else:
        submit(args, unfinished, folder)
        queued = names_in_queue(folder)
    states = ["queued" if run.folder.name in queued else state_of(run.folder) for run in runs]
    for run, state in zip(runs, states):
        print(f"{state}: {run.folder.name}" + (f": {last_line(run)}" if state == "failed" else ""))
    print(", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))))
    if set(states) != {"done"}:
        print(f"the same command finishes what is missing: python {shlex.join(sys.argv)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
