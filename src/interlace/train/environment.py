"""What a run writes down about itself: environment, run file, costs, plan."""

import datetime
import json
import os
import platform
import shlex
import socket
import sys
from pathlib import Path

import torch

import interlace
from interlace import run_files
from interlace.ir import plan as plans
from interlace.ir import store
from interlace.lab.links import link_label
from interlace.train.session import Session


def describe_environment(session: Session, directory: Path) -> None:
    """Write environment.json, the resolved run.toml and, if there are, costs and plan.

    What a run that this one goes on with has left of these, and the recorded steps of ranks that
    are no more, are removed: the report would show them as this run's.
    """
    import tomli_w  # noqa: PLC0415  only runs that write files need it

    config = session.asked
    on_gpu = session.device.type == "cuda"
    facts = {
        "interlace": interlace.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {socket.gethostname()}",
        "device": torch.cuda.get_device_name(session.device) if on_gpu else "cpu",
        "world_size": session.world_size,
        "seed": config.train.seed,
        "link": link_label(config.link),
        "data": session.dataset.digest,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": os.environ.get("INTERLACE_COMMAND") or shlex.join(sys.argv),
    }
    text = json.dumps(facts, indent=1) + "\n"
    found = {run_files.ENVIRONMENT: text, run_files.RUN: tomli_w.dumps(config.as_dict())}
    for name, content in found.items():
        store.write_whole(directory / name, content.encode())
    describe_plan(session, directory)
    for path in run_files.timeline_files(directory):
        if run_files.rank_of(path) >= session.world_size:
            path.unlink()


def describe_plan(session: Session, directory: Path) -> None:
    """Write costs and plan, and remove what is left of others."""
    found: dict[str, str] = {}
    if session.costs is not None:
        found[run_files.COSTS] = store.dumps(session.costs)
    main = session.main
    if main is not None and main.decomposed is not None:
        found[run_files.DECOMPOSE] = json.dumps(main.decomposed.as_dict(), indent=1) + "\n"
    if main is not None and session.plan is not None:
        found[run_files.PLAN] = plans.to_text(session.plan, main.strands.op_graphs)
    for name in (run_files.COSTS, run_files.DECOMPOSE, run_files.PLAN):
        if name not in found:  # of the run that this one goes on with
            (directory / name).unlink(missing_ok=True)
    for name, content in found.items():
        store.write_whole(directory / name, content.encode())
