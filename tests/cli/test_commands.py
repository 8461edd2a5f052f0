"""Every command reaches its code with the right arguments, and says clearly what is wrong.

The trainer, planner, lab and report are replaced: what is proved here is the command line itself.
"""

import sys
import types
from pathlib import Path

import pytest

import interlace.bench
from interlace.__main__ import main
from interlace.cli.run_file import load_run_config
from interlace.errors import PeerError, RunError


@pytest.fixture(autouse=True)
def outside_any_job(monkeypatch):
    """The machine that runs the tests may itself be a SLURM or torchrun job."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def calls(monkeypatch):
    """Record calls of the code behind the commands; a call returns the next of `results`."""
    record = types.SimpleNamespace(made=[], results=[])

    def fake(module_name, function_name):
        def function(*arguments, **options):
            record.made.append((function_name, arguments, options))
            result = record.results.pop(0) if record.results else 0
            if isinstance(result, BaseException):
                raise result
            return result

        module = sys.modules.get(module_name)
        if module is None or not getattr(module, "is_fake", False):
            module = types.ModuleType(module_name)
            module.is_fake = True
            monkeypatch.setitem(sys.modules, module_name, module)
        setattr(module, function_name, function)

    fake("interlace.train.worker", "main")
    fake("interlace.train.planning", "plan_command")
    fake("interlace.train.profiling", "profile_command")
    fake("interlace.ranks.launch", "launch")
    fake("interlace.lab.hosts", "run_in_lab")
    fake("interlace.lab.hosts", "clean")
    fake("interlace.report.build", "build_report")
    return record


def test_train_starts_as_many_ranks_as_the_layout_needs(calls, monkeypatch):
    """N is parallel.tensor; the ranks train the resolved file, which is removed afterwards."""
    seen = {}

    def launch(command, **options):
        seen.update(command=command, config=load_run_config(command[6]), options=options)

    monkeypatch.setattr(sys.modules["interlace.ranks.launch"], "launch", launch)
    assert main(["train", "demo", "--train.threads", "3", "--strands=eager", "-v"]) == 0
    assert seen["command"][:6] == [sys.executable, "-P", "-u", "-m", "interlace", "train"]
    assert seen["command"][7:] == ["-v"]
    supervised = {"watchdog": seen["config"].watchdog, "must_join": True}
    assert seen["options"] == {"ranks": 2, "cores_per_rank": 3, "verbose": True} | supervised
    assert seen["config"] == load_run_config("demo", {"train.threads": "3", "strands": "eager"})
    assert not Path(seen["command"][6]).exists()


def test_flags_of_every_kind_reach_the_configuration(calls):
    """Switches, repeated options, dashes for underscores, values after = and after a space."""
    arguments = (
        "plan quickstart --output.overwrite --train.no-deterministic --plan.cache=false "
        "--compare.modes eager --compare.modes 1 --train.micro-batches 6 --train.seed=5 "
        "--output p.json"
    )
    assert main(arguments.split()) == 0
    [(name, (config, output), _)] = calls.made
    assert name == "plan_command"
    assert output == Path("p.json")
    assert (config.output.overwrite, config.train.deterministic, config.plan.cache) == (
        True,
        False,
        False,
    )
    assert config.compare.modes == ("eager", "1")
    assert (config.train.micro_batches, config.train.seed) == (6, 5)
    assert config.model == load_run_config("quickstart").model


def test_train_is_a_rank_when_the_environment_says_so(calls, monkeypatch):
    """Under torchrun the worker runs in this process, and its code is the exit code."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    calls.results = [1]
    assert main(["train", "demo"]) == 1
    assert calls.made == [("main", (load_run_config("demo"),), {})]


def test_a_rank_says_which_one_it_is(calls, monkeypatch, capsys):
    """Errors of ranks that share a terminal carry the rank."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    calls.results = [PeerError("rank 0 is silent", ranks=[0], hint="look at its log")]
    assert main(["train", "demo"]) == 1
    assert capsys.readouterr().err == "error: rank 1: rank 0 is silent\nhint: look at its log\n"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ("train", 'Command "train" parameter RUN requires an argument', "train --help"),
        ("trian demo", 'Unknown command "trian"', 'did you mean "train"?'),
        ("train dmo", "no run file or preset 'dmo'", "did you mean 'demo'?"),
        ("train no/run.toml", "no run file no/run.toml", "quickstart"),
        ("train demo --train.stpes 3", "Unknown option: --train.stpes", "--train.steps"),
        ("train demo --wombat", "Unknown option: --wombat", "interlace train --help"),
        ("train demo --train.steps many", "train.steps = 'many' must be a whole number", "as in"),
        ("train demo --train.steps 0", "train.steps = 0 must be positive", "set train.steps"),
        ("train demo --strands 3", "strands = '3' must be one of", "as in"),
        ("train demo --model x", "--model", "interlace train --help"),
        ("train demo --output.overwrite true", "Unused Tokens: ['true']", "--name=false"),
        ("train demo --output.overwrite=x", 'convert "x" into bool', "--help"),
        ("train demo --nproc x", 'unable to convert "x" into int', "--help"),
        ("train demo --nproc 0", "--nproc 0 must be positive", "set --nproc"),
        ("train demo --nproc 3", "the world size is 3", "--nproc 2"),
        ("train llama-70b", "needs 64 ranks, more than a machine", "say --nproc 64"),
        ("train demo --model.heads 9", "is not a multiple of model.heads", "set model.width"),
        ("train demo --train.micro_batches 1", "at least two micro-batches", "or strands to 1"),
        ("plan demo --plan.cash no", "Unknown option: --plan.cash", "--plan.cache"),
        ("bench strnds", "there is no bench 'strnds'", "strands"),
        ("lab run --hosts 2", "no command to run in the lab", "put it after --"),
        ("lab run --hosts 0 -- true", "--hosts 0 must be positive", "set --hosts"),
        ("lab run --rate fast -- true", "--rate = 'fast' is not a link rate", "250mbit"),
        ("report no/such", "there is no folder or file no/such", "output.directory"),
        ("profile demo --again true", "Unused Tokens: ['true']", "--name=false"),
        ("profile demo -o .", ". is a folder", "name a file: costs.json"),
        ("profile demo -o /proc/c.json", "cannot write to /proc", "another --output"),
        ("profile demo --output", "parameter --output requires an argument", "--help"),
        ("profile demo --nproc 3", "the world size is 3", "--nproc 2"),
    ],
)
@pytest.mark.usefixtures("benches")
def test_bad_input_is_refused(calls, capsys, arguments, message, hint):
    """Exit code 2, `error:` and `hint:` on standard error, no traceback, nothing was started."""
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert not out
    assert not calls.made
    first, last = err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert last.startswith("hint: ")
    assert hint in last


def test_nproc_under_torchrun_is_refused(calls, monkeypatch, capsys):
    """Starting ranks inside a rank is a mistake."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "demo", "--nproc", "2"]) == 2
    assert "already one rank of 2" in capsys.readouterr().err
    assert calls.made == []


def test_profile_starts_ranks_that_profile(calls, tmp_path, monkeypatch):
    """The ranks get the resolved run file and the same output, wherever they start."""
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "demo", "-o", "deep/c.json", "--again", "--train.threads", "2"]) == 0
    [(name, (command,), options)] = calls.made
    assert name == "launch"
    assert command[:6] == [sys.executable, "-P", "-u", "-m", "interlace", "profile"]
    assert command[7:] == ["--output", str(tmp_path / "deep" / "c.json"), "--again"]
    supervised = {"watchdog": load_run_config("demo").watchdog, "must_join": True}
    assert options == {"ranks": 2, "cores_per_rank": 2, "verbose": False} | supervised


def test_profile_is_a_rank_when_the_environment_says_so(calls, tmp_path, monkeypatch):
    """Under torchrun it measures in this process, and its code is the exit code."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    calls.results = [130]
    assert main(["profile", "demo", "-o", str(tmp_path / "c.json")]) == 130
    [(name, arguments, options)] = calls.made
    assert name == "profile_command"
    assert arguments == (load_run_config("demo"), tmp_path / "c.json")
    assert options["again"] is False


def test_profile_never_replaces_a_file_that_is_no_cost_file(calls, tmp_path, capsys):
    """A run file given as output by mistake stays as it is, also with --again."""
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 3\n")
    assert main(["profile", "demo", "-o", str(file), "--again"]) == 2
    assert f"{file} is not valid JSON" in capsys.readouterr().err
    assert calls.made == []
    assert file.read_text() == "[train]\nsteps = 3\n"


def test_a_typo_in_a_file_names_file_and_key(tmp_path, capsys):
    """The whole message, as a user sees it."""
    file = tmp_path / "run.toml"
    file.write_text("[train]\nstpes = 3\n")
    assert main(["train", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"error: {file}: unknown key train.stpes\nhint: did you mean 'train.steps'?\n"
    )


@pytest.fixture
def benches(tmp_path, monkeypatch):
    """A folder of benches in place of ours: one good, one helper, one that cannot be imported."""
    (tmp_path / "strands.py").write_text(
        '"""Two strands against one.\n\nMore."""\nCALLS = []\n'
        "def run(*, quick, json_path):\n    CALLS.append((quick, json_path))\n    return 1\n"
    )
    (tmp_path / "tables.py").write_text('"""A helper."""\n')
    (tmp_path / "heavy.py").write_text('"""Imports."""\nimport nothing_like_it\ndef run(): ...\n')
    monkeypatch.setattr(interlace.bench, "__path__", [str(tmp_path)])
    yield
    for name in ("strands", "heavy"):
        sys.modules.pop(f"interlace.bench.{name}", None)


def test_bench_lists_without_importing(benches, capsys):
    """Names and first docstring lines, of modules that can run, without importing any."""
    assert main(["bench"]) == 0
    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()] == [
        ["heavy", "Imports."],
        ["strands", "Two strands against one."],
    ]
    assert "interlace.bench.strands" not in sys.modules


def test_bench_runs_one(benches):
    """The options arrive, and the bench's code is the exit code."""
    assert main(["bench", "strands", "--quick", "--json", "rows.json"]) == 1
    (called,) = sys.modules["interlace.bench.strands"].CALLS
    assert called == (True, Path("rows.json"))


def test_lab_passes_the_command_untouched(calls):
    """Nothing after -- is ours: neither -v nor --help nor another --."""
    words = ["interlace", "train", "demo", "-v", "--help", "--rate", "x", "--", "--train.steps=3"]
    calls.results = [3]
    assert main(["lab", "run", "--hosts", "3", "--rate=250mbit", "--", *words]) == 3
    assert calls.made == [
        ("run_in_lab", (words,), {"hosts": 3, "ranks_per_host": 1, "rate": "250mbit"})
    ]


def test_lab_clean_says_how_many(calls, capsys):
    """The number of removed labs is data, not the exit code."""
    calls.results = [4]
    assert main(["lab", "clean"]) == 0
    assert capsys.readouterr().out == "labs removed: 4\n"


def test_report_prints_what_it_wrote(calls, tmp_path, capsys):
    """One path a line on standard output."""
    calls.results = [[tmp_path / "report.html", tmp_path / "timeline.png"]]
    assert main(["report", str(tmp_path), "--output", "r.html"]) == 0
    assert calls.made == [("build_report", (tmp_path, Path("r.html")), {})]
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n{tmp_path}/timeline.png\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RunError("it broke"), 1, "error: it broke\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (OSError(28, "No space left on device"), 1, "error: cannot write the output: No space"),
    ],
)
def test_failures_have_codes_and_no_traceback(calls, capsys, error, code, message):
    """Whatever is raised ends as one message; -v shows the traceback before it."""
    calls.results = [error, error]
    assert main(["report", "."]) == code
    assert capsys.readouterr().err.startswith(message)
    assert main(["report", ".", "-v"]) == code
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert message in err
