"""The shell around the commands: errors, exit codes, what is loaded and what is shown."""

import json
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ebpfproxy import __version__, cli
from ebpfproxy.config import Config, Loaded
from ebpfproxy.diagnose.explain.reasons import BY_SUBJECT
from ebpfproxy.errors import EXIT_CODES, INTERRUPTED, EbpfProxyError, KernelError, SourceError


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """`ebpfproxy run`, whose agent ends as `ending.error` says; `ending.config` is what it was given."""
    end = types.SimpleNamespace(error=None, config=None, content=None)

    def run(loaded: Loaded, reread: object) -> None:
        end.config, end.content = loaded.config, loaded.content
        if end.error:
            raise end.error

    process = types.ModuleType("ebpfproxy.agent.process")
    process.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ebpfproxy.agent.process", process)
    monkeypatch.setattr("ebpfproxy.agent.process", process, raising=False)
    root = logging.getLogger()
    handlers, level, of_package = root.handlers[:], root.level, logging.getLogger("ebpfproxy").level
    yield end
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("ebpfproxy").setLevel(of_package)


def test_run_passes_its_configuration_to_the_agent(ending: types.SimpleNamespace) -> None:
    assert cli.main(["run", "--proxy-mode=ebpf", "-v=2"]) == 0
    assert ending.config == Config.parse({"proxy_mode": "ebpf", "verbosity": "2"})


def test_run_passes_the_content_of_the_file_to_the_agent_so_that_no_change_is_lost(
    ending: types.SimpleNamespace, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n")
    assert cli.main(["run", f"--config={file}"]) == 0
    assert ending.content == file.read_bytes()


@pytest.mark.parametrize(("kind", "code"), [(SourceError, 3), (KernelError, 4), (EbpfProxyError, 1)])
def test_an_expected_error_of_the_agent_is_logged_with_its_hint_and_has_its_own_exit_code(
    ending: types.SimpleNamespace, capsys: pytest.CaptureFixture[str], kind: type[EbpfProxyError], code: int
) -> None:
    ending.error = kind("it went wrong", "do this")
    assert cli.main(["run", "--logging-format=json"]) == code
    captured = capsys.readouterr()
    logged = json.loads(captured.err)
    del logged["ts"]
    assert captured.out == ""
    assert logged == {"level": "error", "msg": cli.ENDED, "error": "it went wrong", "hint": "do this"}


def test_an_error_without_a_hint_is_one_line(
    ending: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    ending.error = SourceError("it went wrong")
    cli.main(["run"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f' ERROR {cli.ENDED} error="it went wrong"')


@pytest.mark.parametrize(("kind", "code"), [(SourceError, 3), (KernelError, 4), (EbpfProxyError, 1)])
def test_an_expected_error_of_another_command_prints_a_line_and_a_hint(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: type[EbpfProxyError],
    code: int,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise kind("it went wrong", "do this")

    command = cli.group.get_command(click.Context(cli.group), "version")
    monkeypatch.setattr(command, "callback", fail)
    assert cli.main(["version"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "ebpfproxy: it went wrong\n  hint: do this\n")


def test_invalid_options_print_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--sync-period=5", "--ebpf-slots-max=many"]) == 2
    assert capsys.readouterr().err == (
        'ebpfproxy: --sync-period: "5" is not a duration such as 30s, 1m30s or 1h\n'
        'ebpfproxy: --ebpf-slots-max: "many" is not a whole number\n'
    )


def test_an_unexpected_error_prints_one_line_with_the_flag_for_a_traceback(
    ending: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    ending.error = ZeroDivisionError("division\nby zero")
    assert cli.main(["run", "-v=3"]) == 1
    expected = "internal error: ZeroDivisionError: division by zero; run again with -v=4 for the traceback"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f' ERROR {cli.ENDED} error="{expected}"')


@pytest.mark.parametrize("flag", ["-v=4", "--v=9"])
@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), KernelError("division by zero")])
def test_from_v4_on_the_traceback_is_shown(
    ending: types.SimpleNamespace, capsys: pytest.CaptureFixture[str], flag: str, error: Exception
) -> None:
    ending.error = error
    cli.main(["run", flag])
    lines = capsys.readouterr().err.splitlines()
    assert f" ERROR {cli.ENDED} error=" in lines[0]
    assert "run again" not in lines[0]
    assert lines[1] == "Traceback (most recent call last):"
    assert lines.count(lines[1]) == 1


def test_an_interrupt_ends_with_130_and_without_a_traceback(
    ending: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    ending.error = KeyboardInterrupt()
    assert cli.main(["run"]) == 130
    assert capsys.readouterr().err.strip() == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "--proxy-mod=ebpf"], ["unknown flag: --proxy-mod", "did you mean --proxy-mode?"]),
        (["run", "word"], ["got unexpected extra argument (word)", "ebpfproxy run --help"]),
        (["runn"], ["no such command 'runn'", "ebpfproxy --help"]),
        (["--proxy-mode=ebpf"], ["unknown flag: --proxy-mode", "ebpfproxy run --proxy-mode=ebpf"]),
        (["version", "-o", "yaml"], ["invalid value for '-o' / '--output'", "ebpfproxy version --help"]),
    ],
)
def test_a_wrong_command_line_is_one_line_with_a_hint_and_ends_with_2(
    capsys: pytest.CaptureFixture[str], args: list[str], words: list[str]
) -> None:
    assert cli.main(args) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith(f"ebpfproxy: {words[0]}")
    assert hint.startswith("  hint: ")
    assert words[1] in hint


def test_explain_lists_every_reason_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--reasons"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines if line.startswith("  ")] == [
        [each.word, each.meaning] for reasons in BY_SUBJECT.values() for each in reasons
    ]


def test_every_exit_code_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for each in EXIT_CODES:
        assert f"\n    {each.code:<3}  {each.meaning}\n" in shown


def test_the_exit_code_of_every_error_class_is_described() -> None:
    described = {each.code for each in EXIT_CODES}
    classes = [EbpfProxyError]
    for each in classes:  # grows meanwhile
        classes += each.__subclasses__()
        assert each.exit_code in described, each
    assert {click.UsageError.exit_code, click.ClickException.exit_code, INTERRUPTED} <= described


def test_no_command_shows_the_help_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith("Usage: ebpfproxy ")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert cli.main([flag]) == 0
    shown = capsys.readouterr().out
    for name, summary in cli.COMMANDS.items():
        assert f"\n  {name} " in shown
        assert summary in " ".join(shown.split())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_listed_command_exists(name: str) -> None:
    command = cli.group.get_command(click.Context(cli.group), name)
    assert command is not None
    assert command.name == name
    assert command.help


@pytest.mark.parametrize("args", [["version"], ["--version"], ["run", "--version"], ["run", "--version=raw"]])
def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert cli.main(args) == 0
    assert capsys.readouterr().out == f"ebpfproxy {__version__}\n"


def test_the_version_as_json_includes_python_and_the_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version", "-o=json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "version": __version__,
        "python": sys.version.split()[0],
        "kernel": os.uname().release,
        "architecture": os.uname().machine,
    }


def test_the_process_ends_with_the_exit_code() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "ebpfproxy", "run", "--sync-period=x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("ebpfproxy: --sync-period: ")


@pytest.mark.parametrize("args", [["version"], ["run", "--help"], ["run", "--sync-period=x"]])
def test_simple_commands_load_no_large_libraries(args: list[str]) -> None:
    program = (
        "import sys; from ebpfproxy.cli import main; main(sys.argv[1:]);"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=True)
    loaded = set(ended.stderr.splitlines()[-1].split())
    assert "click" in loaded
    assert not loaded & {"bcc", "kubernetes", "pyroute2", "prometheus_client", "rich", "msgspec", "yaml"}
