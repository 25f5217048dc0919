"""How a run of the command line ends: exit codes, one-line errors, and no heavy imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from toolkit.cli import app as app_module, main as cli
from toolkit.errors import NotProven, UsageError

HEAVY = ("numpy", "onnx", "onnxruntime", "torch", "transformers", "onnxsim", "onnxscript")


def run_python(code: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **kwargs
    )


@pytest.fixture
def command(monkeypatch):
    """Replaces the app: main() runs the given function instead."""

    def install(function):
        monkeypatch.setattr(app_module, "app", lambda **_: function())

    return install


def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", "optimize", "absent.onnx"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "'absent.onnx' does not exist" in done.stderr


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom toolkit.cli.main import main\nmain(['--help'])\n"
        f"print('LOADED', [m for m in {HEAVY} if m in sys.modules])"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout


@pytest.mark.parametrize(("command", "hints"), [("optimize", True), ("inspect", False)])
def test_a_second_argument_is_not_the_output(capsys, command, hints):
    assert cli.main([command, "in.onnx", "out.onnx"]) == 2
    told = capsys.readouterr().err
    assert "unexpected extra argument(s) (out.onnx)" in told
    assert ("-o FILE" in told) is hints


def test_no_arguments_is_help(capsys):
    assert cli.main([]) == 0
    assert "passes" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("toolkit 0.")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["pases"], "passes"),
        (["--nope"], "--nope"),
        (["passes", "--jsn"], "--jsn"),
        (["passes", "a", "b"], "b"),
    ],
)
def test_bad_usage_is_one_line(capsys, arguments, reason):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert reason in captured.err


@pytest.mark.parametrize(("error", "code"), [(UsageError, 2), (NotProven, 1)])
def test_errors_are_one_line_with_their_exit_code(capsys, command, error, code):
    def fail():
        raise error("first\nsecond")

    command(fail)
    assert cli.main(["x"]) == code
    assert capsys.readouterr().err == "error: first second\n"


def test_a_defect_is_not_mistaken_for_not_proven(capsys, command, monkeypatch):
    command(lambda: {}["missing"])
    assert cli.main(["x"]) == 70
    captured = capsys.readouterr().err
    assert captured.startswith("error: internal error: KeyError: 'missing' (test_main.py:")
    assert captured.count("\n") == 1
    monkeypatch.setenv("TOOLKIT_TRACEBACK", "1")
    assert cli.main(["x"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_interrupted(command, capsys):
    def interrupt():
        raise KeyboardInterrupt

    command(interrupt)
    assert cli.main(["x"]) == 130
    assert capsys.readouterr().err == "interrupted, nothing written\n"


def test_interrupted_while_something_is_imported(command, capsys):
    """A module that is being imported may make an ImportError of it."""

    def interrupt():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)  # it may take a moment to arrive
        except KeyboardInterrupt:
            raise ImportError("half a module") from None

    command(interrupt)
    assert cli.main(["x"]) == 130
    assert capsys.readouterr().err == "interrupted, nothing written\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_terminated_is_as_orderly_as_interrupted(command, capsys):
    command(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(["x"]) == 143
    assert capsys.readouterr().err == "interrupted, nothing written\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_pass_that_ends_the_program(command, capsys):
    command(lambda: sys.exit(0))
    assert cli.main(["x"]) == 2
    assert "a pass, a reader or a metric ended the program" in capsys.readouterr().err


def test_help_has_a_short_name_and_flags_take_no_value(run):
    done = run("optimize", "-h")
    assert done.code == 0
    assert "<bool>" not in done.out
    assert "--quiet" in done.out


@pytest.mark.skipif(sys.platform == "win32", reason="pipes end differently there")
@pytest.mark.parametrize("arguments", [[], ["passes"], ["passes", "--json"]])
def test_a_closed_pipe_is_quiet(arguments):
    code = f"import sys; from toolkit.cli.main import main; sys.exit(main({arguments!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


# Standard output that cannot be written ----------------------------------------------------------


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = line.replace("toolkit ", f"'{sys.executable}' -m toolkit.cli.main ")
    variables = {**os.environ, **environment}
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=60, env=variables
    )


needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


@needs_full
@pytest.mark.parametrize("report", ["--json /dev/full", "--json - > /dev/full"])
def test_no_model_without_its_report(tiny, tmp_path, report):
    done = shell(f"toolkit optimize {tiny} {report}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.onnx"]


def test_no_report_without_its_model(run, tiny, tmp_path, monkeypatch):
    from toolkit.errors import SaveError
    from toolkit.ir.model import Model

    def full(*_):
        raise SaveError("the disk is full")

    monkeypatch.setattr(Model, "save", full)
    assert run("optimize", tiny, "--json", tmp_path / "report.json").code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.onnx"]


@needs_full
@pytest.mark.parametrize(("where", "said"), [("> /dev/full", "is written"), (">&-", "")])
def test_a_table_that_nobody_sees(tiny, tmp_path, where, said):
    done = shell(f"toolkit optimize {tiny} {where}")
    assert done.returncode == 0
    assert said in done.stderr
    assert done.stderr.count("\n") == bool(said)
    assert (tmp_path / "tiny.opt.onnx").is_file()


def test_a_console_without_the_characters(tiny, tmp_path):
    folder = tmp_path / "übung"
    folder.mkdir()
    done = shell(f"toolkit optimize {tiny} -o {folder}/o.onnx", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "?bung" in done.stdout


def test_a_locale_without_the_characters(tiny, tmp_path):
    folder = tmp_path / "übung"
    folder.mkdir()
    tiny.rename(folder / "tiny.onnx")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = shell(f"toolkit optimize {folder}/tiny.onnx", **locale)
    assert done.returncode in (0, 2)
    assert "internal error" not in done.stderr
