"""A lab is hosts that reach each other only, and leaves nothing behind, however it ends.

Needs Linux, root and iproute2; elsewhere every test is skipped with the reason.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_programs import CONNECT, LIMIT_S, OWNER, RANK, SEND, alive, left, until

from interlace.errors import InputError
from interlace.lab import namespaces
from interlace.lab.hosts import (
    Lab,
    available,
    clean,
    inside_lab,
    run_in_lab,
    set_own_rate,
    set_rate_of,
)

_REASON = available()
pytestmark = [
    pytest.mark.alone,  # its ranks are pinned to cores, which others would take
    pytest.mark.skipif(bool(_REASON), reason=f"no lab can be made here: {_REASON}"),
]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    # Labs of others come and go between two looks of `left`; what we left would stay.
    until(lambda: not left(), f"{left()} removed", limit_s=5.0)


def _facts(folder: Path, rank: int) -> dict[str, object]:
    return json.loads((folder / f"{rank}.facts").read_text())


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """Arguments of the rank script, after the interpreter."""
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return [str(path), str(tmp_path), "two words"]


def _output(lab: Lab, host: int, *argv: str) -> tuple[int, str]:
    process = lab.exec(host, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output.decode()


@contextlib.contextmanager
def _listener(lab: Lab, host: int) -> Iterator[None]:
    code = "import socket,time; s=socket.create_server(('', 7000)); print('up', flush=True); "
    code += f"s.settimeout({LIMIT_S})\nwhile True: s.accept()"
    process = lab.exec(host, [sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout
    with process.stdout:
        assert process.stdout.readline() == b"up\n"
        yield
        process.kill()


def test_hosts_reach_each_other_and_nothing_else() -> None:
    """Between hosts and to itself a connection works; to the machine outside, none does."""
    with Lab(2, "") as lab, _listener(lab, 0), _listener(lab, 1):
        connect = [sys.executable, "-c", CONNECT]
        for client in (0, 1):
            for address in (lab.address(0), lab.address(1), "127.0.0.1"):
                assert _output(lab, client, *connect, address, "7000", "10") == (0, "")
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as outside:
            port = str(outside.getsockname()[1])
            code, said = _output(lab, 0, *connect, "127.0.0.1", port, "10")
            assert (code, said.strip()) == (1, "ConnectionRefusedError")
        assert _output(lab, 0, *connect, "192.0.2.1", "80", "10") == (1, "OSError\n")


def test_two_labs_at_once_do_not_meet() -> None:
    """Same addresses, disjoint names, and a live lab survives `clean` by anyone."""
    with Lab(1, "") as one, Lab(2, "1gbit") as two, _listener(two, 1):
        clean()
        connect = [sys.executable, "-c", CONNECT, two.address(1), "7000"]
        assert _output(two, 0, *connect, "10") == (0, "")
        assert _output(one, 0, *connect, "0.2")[0] == 1  # that address exists only in the other
        assert one.device(0) != two.device(0)
        assert len(two.device(249)) <= 15


def _shaping(lab: Lab, host: int) -> str:
    return _output(lab, host, "tc", "qdisc", "show", "dev", lab.device(host))[1]


def test_the_rate_of_a_live_lab_changes() -> None:
    """By the lab, by its id, and by a process on one host for that host alone."""
    with Lab(2, "250mbit") as lab:
        assert ["250Mbit" in _shaping(lab, host) for host in (0, 1)] == [True, True]
        lab.set_rate("1.5gbit")
        assert ["1500Mbit" in _shaping(lab, host) for host in (0, 1)] == [True, True]
        set_rate_of(lab.id, "64kbit")
        assert ["64Kbit" in _shaping(lab, host) for host in (0, 1)] == [True, True]
        for rate, wanted in (("2gbit", "2Gbit"), ("", "")):
            code = "import os; from interlace.lab.hosts import set_own_rate; "
            code += f"set_own_rate({rate!r}); print(os.environ['INTERLACE_LAB_RATE'])"
            assert _output(lab, 1, sys.executable, "-c", code) == (0, f"{rate}\n")
            assert ("tbf" in _shaping(lab, 1), wanted in _shaping(lab, 1)) == (bool(rate), True)
        assert "64Kbit" in _shaping(lab, 0)
        lab.set_rate("")
        lab.set_rate("")  # nothing to remove is no error
        assert "tbf" not in _shaping(lab, 0)


def test_data_takes_as_long_as_the_link_makes_it() -> None:
    """2 MB at 100 Mbit/s cannot arrive before 0.15 s, less what the bucket lets pass at once."""
    with Lab(2, "100mbit") as lab:
        receiver = lab.exec(1, [sys.executable, "-c", SEND, "receive"], stdout=subprocess.PIPE)
        assert receiver.stdout
        with receiver.stdout:
            assert receiver.stdout.readline() == b"up\n"
            code, seconds = _output(lab, 0, sys.executable, "-c", SEND, "send", lab.address(1))
            assert receiver.stdout.read() == b"2000000\n"
        assert code == 0
        assert float(seconds) >= (2_000_000 - 90_000) * 8 / 100e6


def test_all_reduce_over_torchrun(
    script: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two hosts add up, each on its own core; output of rank 0, complaints of both come through."""
    assert run_in_lab(["python", *script], hosts=2, ranks_per_host=1, rate="1gbit") == 0
    facts = [_facts(tmp_path, rank) for rank in (0, 1)]
    assert [each["total"] for each in facts] == [3.0, 3.0]
    assert [each["rate"] for each in facts] == ["1gbit", "1gbit"]
    assert [each["argument"] for each in facts] == ["two words", "two words"]
    assert facts[0]["device"] != facts[1]["device"]
    cores = sorted(os.sched_getaffinity(0))
    assert [each["cores"] for each in facts] == [[cores[0]], [cores[1 % len(cores)]]]
    out, err = capfd.readouterr()
    assert out == "output of rank 0\n"
    assert sorted(err.splitlines()) == ["complaint of rank 0", "complaint of rank 1"]


def test_more_ranks_than_cores_is_said(
    script: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks of one host share its cores in turn; a note says that step times say little."""
    ranks = len(os.sched_getaffinity(0)) + 1
    if ranks > 9:
        pytest.skip("needs more processes than this test should start")
    assert run_in_lab(["python", *script], hosts=1, ranks_per_host=ranks, rate="") == 0
    assert _facts(tmp_path, ranks - 1)["cores"] == _facts(tmp_path, 0)["cores"]
    assert f"note: {ranks} ranks share {ranks - 1} cores" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("orders", "code", "said"),
    [
        ({"ORDER_1": "exit 2"}, 2, "lab: rank 1 exited with code 2"),
        ({"ORDER_0": "exit 5", "ORDER_1": "sleep 600"}, 1, "lab: rank 0 exited with code 5"),
        ({"ORDER_1": f"signal {int(signal.SIGKILL)}"}, 1, "lab: rank 1 was ended by signal 9"),
        # A paused rank takes no SIGTERM, and torchrun alone would wait 30 s for it.
        (
            {"ORDER_0": f"signal {int(signal.SIGSTOP)}", "ORDER_1": "exit 3"},
            1,
            "lab: rank 1 exited with code 3",
        ),
    ],
)
def test_exit_codes(
    orders: dict[str, str],
    code: int,
    said: str,
    script: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The code tells bad input from failure, the first rank to fail is named, no rank is left."""
    for name, order in orders.items():
        monkeypatch.setenv(name, order)
    started = time.monotonic()
    assert run_in_lab(["python", *script], hosts=2, ranks_per_host=1, rate="") == code
    assert time.monotonic() - started < LIMIT_S
    assert said in capfd.readouterr().err
    assert not any(alive(int(str(_facts(tmp_path, rank)["pid"]))) for rank in (0, 1))


@contextlib.contextmanager
def _owner(
    script: list[str], tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A running `run_in_lab` whose two ranks sleep; yields it and the pids of the ranks."""
    env = {**os.environ, "ORDER_0": "sleep 600", "ORDER_1": "sleep 600"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *script], env=env)
    try:
        files = [tmp_path / f"{rank}.facts" for rank in (0, 1)]
        until(lambda: all(map(Path.exists, files)) or owner.poll() is not None, "ranks start")
        yield owner, [int(str(_facts(tmp_path, rank)["pid"])) for rank in (0, 1)]
    finally:
        owner.kill()
        owner.wait()
        clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything(
    number: signal.Signals, script: list[str], tmp_path: Path
) -> None:
    """SIGTERM and Ctrl-C end all ranks within seconds; the exit code is the shell's."""
    with _owner(script, tmp_path) as (owner, ranks):
        owner.send_signal(number)
        assert owner.wait(timeout=LIMIT_S) == 128 + number
        assert not any(map(alive, ranks))


def test_clean_removes_what_kill_9_left(script: list[str], tmp_path: Path) -> None:
    """After kill -9 of its owner, one rank paused, a lab is ended and removed; a live one stays."""
    with _owner(script, tmp_path) as (owner, ranks), Lab(1, "") as live:
        os.kill(ranks[1], signal.SIGSTOP)
        owner.kill()
        owner.wait()
        assert all(map(alive, ranks))
        clean()  # how many it returns may include labs of others
        assert not any(map(alive, ranks))
        assert {name for name in left() if live.id not in name} == set()
        assert _output(live, 0, "true") == (0, "")


def test_a_pid_used_again_is_not_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner is known by pid and start time: this process, started at another time, is not it."""
    monkeypatch.setattr(namespaces, "STATE", tmp_path)
    for lab_id, start_ticks in (("aaaaaa", 1), ("bbbbbb", namespaces._start_ticks(os.getpid()))):
        folder = tmp_path / lab_id
        folder.mkdir()
        owner = {"pid": os.getpid(), "start_ticks": start_ticks}
        (folder / "owner.json").write_text(json.dumps(owner))
    assert clean() == 1
    assert clean() == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["bbbbbb"]


def test_a_lab_that_cannot_be_finished_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a command fails half way, what was made is removed and the message quotes it."""
    monkeypatch.setattr(Lab, "address", lambda *_: "not-an-address")
    with pytest.raises(InputError, match="not-an-address") as caught, Lab(2, "1gbit"):
        pass
    assert "--link.rate" in caught.value.hint
    assert "not-an-address" in available()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 0}, "0 hosts"),
        ({"hosts": 251}, "251 hosts"),
        ({"ranks_per_host": 0}, "0 ranks"),
        ({"rate": "fast"}, "'fast' is not a link rate"),
        ({"command": ["no-such-program"]}, "'no-such-program'"),
        ({"command": []}, "''"),
    ],
)
def test_bad_requests_are_refused(arguments: dict[str, object], message: str) -> None:
    """Each names the value and what to set, before anything is made."""
    request = {"command": ["true"], "hosts": 2, "ranks_per_host": 1, "rate": "", **arguments}
    with pytest.raises(InputError, match=message) as caught:
        run_in_lab(**request)
    assert caught.value.hint


def test_what_only_works_inside_or_with_an_existing_lab() -> None:
    """Outside a lab there is no own rate; an unknown id is no lab."""
    assert not inside_lab()
    with pytest.raises(InputError, match="does not run in a lab"):
        set_own_rate("1gbit")
    with pytest.raises(InputError, match="no lab 'ffffff'"):
        set_rate_of("ffffff", "1gbit")


@pytest.mark.parametrize("missing", ["root", "tc", "linux"])
def test_machines_without_labs_say_why(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names what is missing, and the hint the way that works without it."""
    if missing == "root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    elif missing == "tc":
        real = namespaces.shutil.which
        monkeypatch.setattr(
            namespaces.shutil, "which", lambda name: None if name == "tc" else real(name)
        )
    else:
        monkeypatch.setattr(namespaces.platform, "system", lambda: "Darwin")
    assert missing in available().lower()
    with pytest.raises(InputError) as caught:
        clean()
    assert "--link.rate" in caught.value.hint
