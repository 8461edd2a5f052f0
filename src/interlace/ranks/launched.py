"""What a process knows from its environment: which rank of which job it is, and who started it.

Torch is not imported here: cores must be chosen before torch makes its threads.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, MutableMapping

from interlace.errors import InputError

CORES = "INTERLACE_CORES"
"""Environment variable with the cores of a rank, separated by commas."""
LAUNCHER_PID = "INTERLACE_LAUNCHER_PID"
"""Environment variable with the pid of the process that started the rank."""

_PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that a process gets when its parent ends (linux/prctl.h)."""
_SLURM_NAMES = {"SLURM_PROCID": "RANK", "SLURM_LOCALID": "LOCAL_RANK"}
"""Names that torch reads, by SLURM's names for the same."""


def adopt_job(environment: MutableMapping[str, str]) -> int | None:
    """World size of the job that this process is a rank of, or None outside a job.

    A job is RANK and WORLD_SIZE (torchrun), or a step of several srun tasks, whose SLURM names
    are copied to the names that torch reads. Raises InputError for half of either.
    """
    if "RANK" not in environment and _is_srun_task(environment):
        for theirs, ours in _SLURM_NAMES.items():
            environment[ours] = environment.get(theirs, "0")
        environment["WORLD_SIZE"] = _srun_tasks(environment)
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            raise InputError(
                f"srun started {environment['WORLD_SIZE']} tasks without {' and '.join(missing)}, "
                "so the ranks cannot meet",
                hint='export MASTER_ADDR="$(scontrol show hostnames | head -n 1)" '
                "MASTER_PORT=29500 before srun",
            )
    names = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if not names:
        return None
    if len(names) == 1:
        raise InputError(
            f"{names[0]} is set in the environment without its partner",
            hint="set both RANK and WORLD_SIZE (torchrun does), or unset it",
        )
    rank, world_size = (_whole_number(environment, name) for name in names)
    if rank >= world_size:
        raise InputError(
            f"RANK = {rank} is outside WORLD_SIZE = {world_size}",
            hint="ranks count from 0; start the processes with torchrun",
        )
    return world_size


def _srun_tasks(environment: Mapping[str, str]) -> str:
    """Tasks of the step; SLURM_NTASKS counts those of the whole job."""
    return environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")


def _is_srun_task(environment: Mapping[str, str]) -> bool:
    # A batch script has SLURM_PROCID too, but no step: local processes are started there.
    in_step = "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment
    return in_step and _srun_tasks(environment) != "1"


def _whole_number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdecimal():
        raise InputError(
            f"{name} = {environment[name]!r} in the environment is not a whole number",
            hint="start the processes with torchrun, or unset it",
        )
    return int(environment[name])


def launcher_hosts_store(environment: Mapping[str, str]) -> bool:
    """Whether the store of this job lives in the process that started its ranks, not in rank 0."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def follow_launcher(environment: MutableMapping[str, str]) -> None:
    """Take the cores that `launch` chose, and end when it ends. Does nothing in other jobs.

    The two names are removed from `environment`: processes that this rank starts follow the rank.
    """
    cores, launcher = environment.pop(CORES, ""), environment.pop(LAUNCHER_PID, "")
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, map(int, cores.split(",")))
    if launcher and sys.platform == "linux":
        # SIGKILL: a rank that is blocked in a collective runs no Python signal handler.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != int(launcher):
            os.kill(os.getpid(), signal.SIGKILL)
