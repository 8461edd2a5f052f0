"""What only a fresh interpreter shows: what is imported, and what happens to output streams."""

import os
import re
import subprocess
import sys

import pytest

import interlace
from interlace.cli.run_file import preset_files

LIMIT_S = 60
HEAVY = ("torch", "matplotlib", "cattrs", "tomli_w", "jinja2")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    ["--help", "--version", "train --help", "plan --help", "bench --help", "bench", "lab --help",
     "lab run --help", "lab clean --help", "report --help"],
)  # fmt: skip
def test_help_imports_nothing_heavy(command):
    """Help answers at once: no torch, no plotting, no file writers."""
    program = (
        "import sys\n"
        "from interlace.__main__ import main\n"
        f"code = main({command.split()!r})\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported {loaded}' if loaded else code)\n"
    )
    done = run("-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    if "--help" in command:
        assert done.stdout.startswith("Usage: interlace")


def test_help_lists_every_key_with_its_help_text():
    """The docstrings of config.py are the help; keys are spelled as in the file."""
    text = run("-m", "interlace", "train", "--help", COLUMNS="200").stdout
    assert "--train.micro_batch_size INT" in text
    assert "Sequences per micro-batch." in text
    assert "--compare.empty" not in text
    for table in ("model", "model.experts", "parallel", "watchdog"):
        assert text.count(f"─ Run file: {table} ─") == 1
    assert text.index("--nproc") < text.index("--strands") < text.index("Run file: model ─")
    for name in preset_files():
        assert re.search(rf"[ ]{re.escape(name)}[, ]", text)


def test_no_color_is_honoured():
    """NO_COLOR wins even where colour is forced."""
    colour = r"\x1b\[(3|9)\d"
    assert re.search(colour, run("-m", "interlace", "--help", FORCE_COLOR="1").stdout)
    plain = run("-m", "interlace", "--help", FORCE_COLOR="1", NO_COLOR="1").stdout
    assert "train" in plain
    assert not re.search(colour, plain)


def test_version():
    """The version is the package's, alone on standard output."""
    assert run("-m", "interlace", "--version").stdout == interlace.__version__ + "\n"


def test_a_closed_pipe_is_no_error(tmp_path):
    """`interlace report DIR | head -0`: no traceback, no message, the shell's code for SIGPIPE."""
    program = (
        "import sys, types\n"
        "from interlace.__main__ import main\n"
        "module = types.ModuleType('interlace.report.build')\n"
        "module.build_report = lambda directory, output: [directory]\n"
        "sys.modules[module.__name__] = module\n"
        f"sys.exit(main(['report', {str(tmp_path)!r}]))\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=LIMIT_S,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_importing_the_package_does_nothing():
    """No torch, no output, no handlers."""
    done = run("-c", "import sys, interlace, interlace.__main__; print('torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_command_ends_as_python_ends():
    """What was registered for the end runs, what was printed arrives, and a full disk is said once;
    the rest of the interpreter's shutdown, which would free a trace object by object, is left out.
    """
    program = (
        "import atexit, sys, weakref\n"
        "from interlace.__main__ import entry\n"
        "class Folder: pass\n"
        "folder = Folder()\n"
        "weakref.finalize(folder, print, 'finalized')\n"
        "atexit.register(print, 'ended')\n"
        "sys.argv = ['interlace', '--version']\n"
        "entry()\n"
    )
    done = run("-c", program)
    assert done.returncode == 0
    # Temporary folders are removed by such a finalizer.
    assert done.stdout.split() == [interlace.__version__, "ended", "finalized"]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "interlace", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write the output: No space left on device\nhint: ")
    assert "Traceback" not in done.stderr
