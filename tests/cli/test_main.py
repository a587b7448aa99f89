"""The command line without Ray: exit codes, one clear message, and what validate shows."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle_ray.batch.driver.input_plan import plan_input
from eagle_ray.batch.driver.job_manifest import open_run
from eagle_ray.cli import arguments
from eagle_ray.cli import main as cli
from eagle_ray.cli.serve_endpoint import failed_start
from eagle_ray.config import load_config
from eagle_ray.runs.job_errors import outcome_of
from tests.support.tokenizers import write_tokenizer
from tests.support.toy_models import TARGET_JSON

ROOT = Path(__file__).parents[2]


@pytest.fixture
def job(tmp_path):
    """Flags of a job over three rows, one of them bad, with a target that has a tokenizer and no weights."""
    write_tokenizer(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET_JSON))
    rows = [
        {"id": "a", "messages": "Hi", "category": "chat"},
        {"id": "b", "messages": 5},
        {"id": "c", "messages": "So"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["-i", f"{tmp_path}/rows.jsonl", "-o", f"{tmp_path}/out"]
    return [*flags, "--set", f"model.target={tmp_path}/target", "--set", "speculative.method=none"]


def test_validate_shows_rows_and_the_first_prompt(job, tmp_path, capsys):
    assert cli.main(["validate", *job]) == 0
    shown = capsys.readouterr().out
    assert f"3 rows in {tmp_path}/rows.jsonl" in shown
    assert "carried  category string" in shown
    assert "2 good, 1 would become error rows" in shown
    assert (
        f"{tmp_path}/rows.jsonl, line 2: column 'messages' must be a list of messages or a text, got 5"
        in shown
    )
    assert "the first, 'a'" in shown
    assert "| <|bos|><|user|>Hi<|end|><|assistant|>" in shown
    assert f"{tmp_path}/out can be written" in shown
    assert not (tmp_path / "out").exists()


def test_validate_counts_prompt_tokens_and_refuses_long_rows(job, capsys):
    assert cli.main(["validate", *job, "--set", "model.max_model_len=6"]) == 2
    shown = capsys.readouterr().err
    assert "no row can be answered" in shown
    assert "line 1: the prompt has 6 tokens" in shown
    assert "2 do not fit into model.max_model_len" in shown


def test_validate_refuses_messages_without_a_template(job, capsys):
    assert cli.main(["validate", *job, "--set", "model.chat_template=none"]) == 2
    assert "[no_chat_template]" in capsys.readouterr().err


def test_validate_without_a_tokenizer_shows_token_ids(job, tmp_path, capsys):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(TARGET_JSON))
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n{"prompt": "text"}\n')
    flags = ["-i", f"{tmp_path}/ids.jsonl", "--set", f"model.target={tmp_path}/bare"]
    assert cli.main(["validate", *job, *flags]) == 0
    shown = capsys.readouterr().out
    assert "token ids [5, 6]" in shown
    assert "[no_tokenizer]" in shown


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set", "sampling.temprature=1"], "did you mean sampling.temperature?"),
        (["--set", "sampling.n"], "--set section.key=value"),
        (["-i", "nowhere/*.jsonl"], "no file matches 'nowhere/*.jsonl'"),
        (["-c", "nowhere.yaml"], "cannot read the configuration nowhere.yaml"),
        (
            ["--limit", "0"],
            "input.limit: must be a number of rows, 1 or more, or null for all, got 0",
        ),
        (["--set", "model.target=embedded:huge"], "embedded:huge"),
        (["-o", "/dev/null/out"], "output.path: cannot write to /dev/null: Not a directory"),
        (["--set", "input.columns.messages=mesages"], "did you mean messages?"),
        (["--set", "input.on_bad_row=fail"], "line 2: column 'messages'"),
        (["--set", "model.device=gpu"], "model.device: must be auto, cpu or cuda, got 'gpu'"),
        pytest.param(
            ["--set", "model.device=cuda"],
            "model.device: cuda, and torch sees no GPU on this machine",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="needs a machine without a GPU"
            ),
        ),
        (["--set", "model.chat_template=/dev/fd/nowhere"], "'/dev/fd/nowhere' cannot be read"),
        (
            ["--set", "sampling.top_k=1000000000000"],
            "an integer, 0 or -1 (off) or more, at most 2147483647, got 10000",
        ),
    ],
)
def test_what_cannot_work_is_exit_2_and_one_message(job, flags, says, capsys):
    assert cli.main(["validate", *job, *flags]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("eagle-ray: ")
    assert says in output.err
    assert output.out == ""


def test_an_input_that_a_later_one_replaces_is_named(job, tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"id": name, "messages": "hello"}) + "\n"
        )
    inputs = [flag for name in ("a", "b") for flag in ("-i", f"{tmp_path}/{name}.jsonl")]
    assert cli.main(["validate", "-o", str(tmp_path / "out"), *inputs]) == 0
    output = capsys.readouterr()
    assert (
        f"-i {tmp_path}/b.jsonl replaces -i {tmp_path}/a.jsonl. To read them all: --set 'input.path=["
        in output.err
    )
    assert "b.jsonl" in output.out and "a.jsonl" not in output.out


def test_validate_escapes_characters_on_an_ascii_terminal(job, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"messages": "caf\\u00e9"}')
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.main(["validate", *job]) == 0
    assert b"caf\\xe9" in stdout.buffer.getvalue()


def test_validate_refuses_a_head_that_is_no_pair(job, capsys):
    head = ["--set", "speculative.method=eagle2", "--set", "model.draft=embedded:tiny"]
    assert cli.main(["validate", *job, *head]) == 2
    assert "they are not a pair" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "says", "code"),
    [
        ("_run.json", "_run.json is damaged", 6),
        ("data/part-001-000000.parquet", "is there but no", 2),
    ],
)
def test_validate_refuses_a_damaged_or_foreign_output(job, tmp_path, capsys, name, says, code):
    (tmp_path / "out" / "data").mkdir(parents=True)
    (tmp_path / "out" / name).write_text("{")
    assert cli.main(["validate", *job]) == code
    error = capsys.readouterr().err
    assert says in error and str(tmp_path / "out" / name) in error


def test_validate_refuses_an_input_that_the_run_would_refuse(job, tmp_path, capsys):
    flags = {"input.path": f"{tmp_path}/rows.jsonl", "output.path": f"{tmp_path}/out"}
    config = load_config(None, sets=[word for word in job if "=" in word], env={}, overrides=flags)
    open_run(config, plan_input(config).fingerprints)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('\n{"id": "d", "messages": "more"}')
    assert cli.main(["validate", *job]) == 0
    assert "a run would resume run " in capsys.readouterr().out
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "messages": "Hello"}')
    assert cli.main(["validate", *job]) == 2
    assert (
        f"output.path: input changed since {tmp_path}/out was made from it"
        in capsys.readouterr().err
    )


def test_run_refuses_the_same_before_anything_starts(job, tmp_path, capsys):
    assert cli.main(["run", *job, "--set", "seed=x"]) == 2
    assert "seed: must be a 64-bit integer, got 'x' (from --set seed=x)" in capsys.readouterr().err
    assert cli.main(["run", *job, "--set", "input.columns.id=ident"]) == 2
    assert not (tmp_path / "out").exists()


def test_the_help_names_every_command_and_imports_none_of_them():
    program = (
        "import sys\nfrom eagle_ray.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: print([name for name in sys.modules if 'commands' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n") and all(
        f"    {name} " in done.stdout for name in cli.COMMANDS
    )


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_shows_its_flags(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0 and f"usage: eagle-ray {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    "usage", [[], ["generate"], ["run", "--resume", "--overwrite"], ["run", "--limit", "x"]]
)
def test_wrong_usage_is_exit_2(usage, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(usage)
    assert end.value.code == 2
    assert "usage: eagle-ray" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "hint"), [("run", True), ("validate", True), ("serve", False)])
def test_a_file_without_a_flag_is_told_its_flag(command, hint, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "rows.jsonl"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "unrecognized arguments: rows.jsonl" in error and ("-i IN" in error) == hint


def test_an_output_of_another_configuration_is_exit_6(job, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("")
    job = [*job, "--allow-empty"]
    assert cli.main(["run", *job]) == 0
    assert cli.main(["run", *job, "--resume"]) == 0
    assert cli.main(["run", *job, "--set", "seed=3"]) == 6
    assert cli.main(["validate", *job, "--set", "seed=3"]) == 2
    assert "output.path: " in (error := capsys.readouterr().err) and "(seed: was 0, now 3)" in error
    assert cli.main(["run", *job, "--set", "seed=3", "--overwrite"]) == 0
    assert cli.main(["run", *job, "--set", "output.if_exists=fail"]) == 2


@pytest.mark.parametrize("command", ["run", "validate"])
def test_an_empty_input_is_refused_unless_it_is_allowed(job, tmp_path, command, capsys):
    (tmp_path / "rows.jsonl").write_text("\n\n")
    assert cli.main([command, *job]) == 2
    said = capsys.readouterr().err
    assert (
        f"input.path: there is no row in {tmp_path}/rows.jsonl. Give an input" in said
        and "--allow-empty" in said
    )
    assert not (tmp_path / "out").exists()
    assert cli.main([command, *job, "--allow-empty"]) == 0
    assert cli.main([command, *job, "--set", "input.allow_empty=true"]) == 0
    assert (tmp_path / "out" / "_SUCCESS").exists() == (command == "run")


def test_an_interrupt_is_exit_130(job, monkeypatch, capsys):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(arguments, "load_config", interrupt)
    assert cli.main(["validate", *job]) == 130
    assert capsys.readouterr().err == "eagle-ray: interrupted\n"


def test_exit_zero_if_permanent_covers_only_permanent_failures(job, monkeypatch, capsys):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    wrong = ["run", *job, "--set", "seed=x"]
    assert cli.main(wrong) == 2 and cli.main([*wrong, "--exit-zero-if-permanent"]) == 0
    assert "exit 0 in place of 2 (configuration)" in capsys.readouterr().err
    monkeypatch.setattr(arguments, "load_config", interrupt)
    assert cli.main([*wrong, "--exit-zero-if-permanent"]) == 130


@pytest.mark.parametrize(
    ("cause", "code", "says"),
    [
        (
            "eagle_ray.config.job.UnfitDevice: require_kernels: true, but",
            2,
            "a replica cannot start: require_kernels",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory",
            5,
            "did not start: torch.OutOfMemoryError: CUDA out of memory",
        ),
    ],
)
def test_an_endpoint_that_does_not_start_says_why(cause, code, says):
    serves = f"The deployment failed to start 3 times in a row. Error:\nRuntimeError: Traceback\n  File x\n{cause}\n\n"
    error = failed_start("Failed to update the deployments ['engine'].", ["", serves])
    assert outcome_of(error).code == code and says in str(error)
    without = failed_start("Deploying\nfailed", [""])
    assert outcome_of(without).code == 5 and str(without).endswith(
        "the replicas did not start: Deploying failed"
    )


def test_validate_needs_no_ray(job):
    code = f"import sys; from eagle_ray.cli import main; main.main(['validate', *{job}]); print('ray' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.endswith("\nFalse\n")


def test_the_job_script_is_the_run_command(job):
    command = [sys.executable, "jobs/generate.py", *job, "--set", "seed=x"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "eagle-ray: seed: must be a 64-bit integer, got 'x' (from --set seed=x)\n"


def test_a_command_that_used_ray_ends_it_and_then_at_once(tmp_path):
    """Python would free what Ray has left, for a second."""
    code = f"""
import atexit, sys, types
from eagle_ray.cli.__main__ import command
sys.modules["ray"] = types.SimpleNamespace(shutdown=lambda: print("Ray has ended"))
sys.argv[1:] = ["status", "{tmp_path}/none"]
atexit.register(print, "too late")
command()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "Ray has ended\n")
    assert found.stderr.startswith("eagle-ray: ")


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_reader_that_has_gone_ends_the_command_quietly(job, tmp_path, command, warm_python):
    if command == "run":
        (tmp_path / "rows.jsonl").write_text("")  # nothing to do: no Ray
    line = [
        sys.executable,
        "-m",
        "eagle_ray.cli",
        command,
        *job,
        "--allow-empty",
        "--set",
        "logging.level=error",
    ]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        done = subprocess.run(
            line, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


def nothing_to_do(job: list[str], tmp_path: Path, *flags: str) -> list[str]:
    """Return the command of a run without rows, which starts no Ray."""
    (tmp_path / "rows.jsonl").write_text("")
    return [sys.executable, "-m", "eagle_ray.cli", "run", *job, "--allow-empty", *flags]


@pytest.mark.parametrize("flags", [[], ["--keep-going"]])
def test_a_run_whose_log_nobody_reads_goes_on(job, tmp_path, flags, warm_python):
    reader, writer = os.pipe()
    os.close(reader)
    line = nothing_to_do(job, tmp_path, *flags)
    with open(writer, "w") as stderr:
        done = subprocess.run(
            line, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT, check=False
        )
    assert done.returncode == 0 and "rows in" in done.stdout


def test_a_run_whose_result_nobody_reads_is_not_restarted(job, tmp_path, warm_python):
    reader, writer = os.pipe()
    os.close(reader)
    hook = json.dumps(["sh", "-c", f"echo said; cat > {tmp_path}/told"])
    line = nothing_to_do(job, tmp_path, "--keep-going", "--set", f"on_finish.command={hook}")
    with open(writer, "w") as both:
        assert subprocess.run(line, stdout=both, stderr=both, cwd=ROOT, check=False).returncode == 0
    told = json.loads((tmp_path / "told").read_text())
    assert (told["outcome"], told["restarts"]) == ("done", 0)


def test_a_start_of_ray_without_a_reader_of_stderr_is_no_error(monkeypatch):
    from eagle_ray.batch.driver.cluster import silence_stderr

    kept = os.dup(2)
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    try:
        handler = logging.StreamHandler(sys.stderr)
        monkeypatch.setattr(sys, "stderr", handler.stream)
        monkeypatch.setattr(logging.getLogger("eagle_ray"), "handlers", [handler])
        with silence_stderr():
            logging.getLogger("eagle_ray").warning("starting Ray: 10 s")
    finally:
        os.dup2(kept, 2)


@pytest.mark.parametrize(("command", "code"), [("validate", 2), ("run", 0)])
def test_full_disk_of_stdout_is_named_and_run_is_unchanged(
    job, tmp_path, command, code, warm_python
):
    if command == "run":
        (tmp_path / "rows.jsonl").write_text("")  # nothing to do: no Ray
    line = [
        sys.executable,
        "-m",
        "eagle_ray.cli",
        command,
        *job,
        "--allow-empty",
        "--set",
        "logging.level=warning",
    ]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            line, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert done.returncode == code, done.stderr
    assert (
        done.stderr.count("\n") == 1
        and "stdout cannot be written: No space left on device" in done.stderr
    )


def test_relative_path_in_a_deleted_directory_is_named(tmp_path):
    (tmp_path / "gone").mkdir()
    for path, says in (
        ("out", "'out' is relative, and the current directory has been deleted"),
        (tmp_path, "no run"),
    ):
        line = f"cd {tmp_path}/gone && rm -d {tmp_path}/gone; {sys.executable} -m eagle_ray.cli status {path}"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, env=environment, check=False
        )
        (tmp_path / "gone").mkdir(exist_ok=True)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, (
            done.stderr
        )


def test_a_null_byte_in_a_path_is_refused(job, capsys):
    assert cli.main(["status", "a\0b"]) == 2
    assert cli.main(["run", *job, "-o", "a\0b"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" 'a")[0] for line in said if "null byte" in line] == [
        "eagle-ray: RUN:",
        "eagle-ray: output.path:",
    ]


def test_a_long_id_is_cut_in_what_validate_shows(job, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "x" * 10**6, "prompt_token_ids": [1]}))
    assert cli.main(["validate", *job]) == 0
    assert len(capsys.readouterr().out) < 10_000


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_streams_that_the_shell_closed_change_no_exit_code(job, tmp_path, closed):
    (tmp_path / "rows.jsonl").write_text("")  # nothing to do: no Ray
    line = f"{sys.executable} -m eagle_ray.cli run {' '.join(job)} --allow-empty {closed}"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
