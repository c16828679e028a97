from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.utils.cli import LastLines, ending_process, parse_launch_arguments, set_up_logging


def test_overrides_may_stand_on_both_sides_of_the_option() -> None:
    parsed = parse_launch_arguments("x", argv=["a.b=1", "--config", "c.yaml", "+d=2", "~e", "++f.g=[1,2]"])
    assert parsed.config == Path("c.yaml")
    assert parsed.overrides == ("a.b=1", "+d=2", "~e", "++f.g=[1,2]")


def test_the_configuration_is_required_unless_there_is_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_launch_arguments("x", argv=[])
    assert caught.value.code == 2
    assert "--config" in capsys.readouterr().err
    assert parse_launch_arguments("x", default_config="d.yaml", argv=[]).config == Path("d.yaml")


def raise_(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


def noted(error: BaseException) -> BaseException:
    error.add_note("Raised in policy worker 0, train:\nTraceback")
    error.add_note(LastLines("go on so"))
    return error


@pytest.mark.parametrize(
    ("main", "status", "stderr"),
    [
        (raise_(ConfigError("fact, reason;\n  fix")), 2, "error: fact, reason; fix\n"),
        (raise_(KeyboardInterrupt()), 130, "interrupted\n"),
        (raise_(noted(KeyboardInterrupt())), 130, "interrupted\ngo on so\n"),
        (raise_(noted(ConfigError("fact"))), 2, "error: fact\ngo on so\n"),
        (raise_(noted(SystemExit(138))), 138, "ended by SIGUSR1\ngo on so\n"),
        (raise_(SystemExit(3)), 3, ""),
        (lambda: None, None, ""),
        (lambda: 3, 3, ""),
    ],
)
def test_the_end_of_a_script(
    main: Callable[[], int | None], status: int | None, stderr: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, ending_process():
        sys.exit(main())
    assert caught.value.code == status
    assert capsys.readouterr().err == stderr


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), ending_process():
        _ = 1 // 0


def test_the_command_line_loads_no_heavy_module() -> None:
    code = (
        "import sys, nemo_offload_rl.utils.cli, nemo_offload_rl.config\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'hydra', 'omegaconf', 'pydantic', 'matplotlib', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_log_records_of_the_package_go_to_standard_error_once(capsys: pytest.CaptureFixture[str]) -> None:
    package = logging.getLogger("nemo_offload_rl")
    before = (package.handlers[:], package.level, package.propagate)
    try:
        set_up_logging()
        set_up_logging()
        logging.getLogger("nemo_offload_rl.x").info("hello")
        captured = capsys.readouterr()
    finally:
        package.handlers[:], package.level, package.propagate = before
    assert captured.err.count("hello") == 1
    assert captured.out == ""


def test_a_notebook_shows_one_line_for_bad_input():
    # The hook of IPython, which is no requirement: https://ipython.readthedocs.io/en/stable/config/integrating.html
    assert ConfigError("grpo.seed is 'x'; set a number")._render_traceback_() == [
        "ConfigError: grpo.seed is 'x'; set a number"
    ]
