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
from interlace.ir import plan as plans
from interlace.ir import store
from interlace.train.session import Session, link_label


def describe_environment(session: Session, directory: Path) -> None:
    """Write environment.json, the resolved run.toml and, if there are, costs and plan."""
    import tomli_w  # noqa: PLC0415  only runs that write files need it

    config = session.config
    on_gpu = session.device.type == "cuda"
    facts = {
        "interlace": interlace.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {socket.gethostname()}",
        "device": torch.cuda.get_device_name(session.device) if on_gpu else "cpu",
        "world_size": session.world_size,
        "seed": config.train.seed,
        "link": link_label(config),
        "data": session.dataset.digest,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": os.environ.get("INTERLACE_COMMAND") or shlex.join(sys.argv),
    }
    text = json.dumps(facts, indent=1) + "\n"
    (directory / "environment.json").write_text(text, encoding="utf-8")
    (directory / "run.toml").write_text(tomli_w.dumps(config.as_dict()), encoding="utf-8")
    if session.costs is not None:
        store.save(session.costs, directory / "costs.json")
    if session.strands is not None and session.strands.listing is not None:
        listing = json.dumps(session.strands.listing.as_dict(), indent=1) + "\n"
        (directory / "decompose.json").write_text(listing, encoding="utf-8")
    if session.plan is not None and session.strands is not None:
        graphs = session.strands.op_graphs
        table = plans.to_text(session.plan, graphs)
        (directory / "plan.txt").write_text(table, encoding="utf-8")
