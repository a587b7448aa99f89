"""Programs forked from the warm process: what Popen promises of a child holds, and modules are there already."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.skipif(
        sys.platform != "linux", reason="elsewhere every child is a fresh interpreter"
    ),
]


def run_code(code: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, **options
    )


def test_child_has_its_arguments_and_parent_and_torch():
    done = run_code("import sys, os; print(sys.argv, os.getppid(), 'torch' in sys.modules)", "one")
    assert done.stdout == f"['-c', 'one'] {os.getpid()} True\n"


def test_child_has_its_environment_directory_and_input(tmp_path):
    code = "import os, sys; print(sorted(os.environ), os.getcwd(), sys.stdin.read())"
    done = run_code(code, env={"ONLY": "1"}, cwd=tmp_path, input="text")
    assert (
        done.stdout == f"['LC_CTYPE', 'ONLY'] {tmp_path} text\n"
        or done.stdout == f"['ONLY'] {tmp_path} text\n"
    )


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_exit_code_is_the_childs(code, exit_code):
    assert run_code(code).returncode == exit_code


def test_traceback_goes_to_stderr():
    assert run_code("1 / 0").stderr.endswith("ZeroDivisionError: division by zero\n")


def test_threads_and_exit_handlers_run_to_their_end():
    code = "import atexit, threading; atexit.register(print, 'exit'); threading.Timer(0.05, print, ['timer']).start()"
    assert run_code(code).stdout == "timer\nexit\n"


def test_module_is_run_as_main():
    done = subprocess.run(
        [sys.executable, "-m", "eagle_ray.cli", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("eagle-ray ")


def test_child_can_be_killed():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.kill()
    assert child.wait() == -signal.SIGKILL


def test_open_files_are_passed_by_number(tmp_path):
    with open(tmp_path / "file", "w") as file:
        done = run_code(
            "import os, sys; os.write(int(sys.argv[1]), b'text')",
            str(file.fileno()),
            pass_fds=[file.fileno()],
        )
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "text"


def test_child_leads_a_session_of_its_own():
    assert (
        run_code("import os; print(os.getsid(0) == os.getpid())", start_new_session=True).stdout
        == "True\n"
    )
