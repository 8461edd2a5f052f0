"""`interlace lab`: run a command on hosts made of network namespaces, and clean up."""

from typing import Annotated

from cyclopts import Parameter

from interlace.cli.options import Verbose
from interlace.config import parse_rate
from interlace.errors import InputError


def run(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    hosts: int = 2,
    ranks_per_host: int = 1,
    rate: str = "1gbit",
    verbose: Verbose = False,
) -> int:
    """Run a command on every rank of a lab. Needs Linux and root.

    Parameters
    ----------
    command
        What to run, after `--`, as in `-- interlace train demo`.
    hosts
        Hosts, joined by a switch.
    ranks_per_host
        Processes on each host, one core each.
    rate
        Bandwidth of each host's link, such as 250mbit or 1gbit.
    verbose
        Show where an error came from.
    """
    if not command:
        raise InputError(
            "there is no command to run in the lab",
            hint="put it after --, as in: interlace lab run -- interlace train demo",
        )
    for option, count in {"--hosts": hosts, "--ranks-per-host": ranks_per_host}.items():
        if count < 1:
            raise InputError(
                f"{option} {count} must be positive", hint=f"set {option} to 1 or more"
            )
    parse_rate(rate, "--rate")
    from interlace.lab.hosts import run_in_lab  # noqa: PLC0415  may import torch

    return run_in_lab(list(command), hosts=hosts, ranks_per_host=ranks_per_host, rate=rate)


def clean(*, verbose: Verbose = False) -> int:
    """Remove the namespaces and links that killed labs left behind.

    Parameters
    ----------
    verbose
        Show where an error came from.
    """
    from interlace.lab.hosts import clean as remove_labs  # noqa: PLC0415  may import torch

    print(f"labs removed: {remove_labs()}")
    return 0
