"""The completion scripts: what bash offers, and that both shells ask the same function of the same words."""

from __future__ import annotations

import argparse
import subprocess

import pytest

from loadtest.bench.flags import parser as bench_parser
from services.launcher.cli import _ALL, _parser, main
from services.launcher.commands.completion import SHELLS, script

PRESS_TAB = """
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _headrace; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return _parser(_ALL)


def offered(parser: argparse.ArgumentParser, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    lines = script("bash", parser, {"bench": bench_parser()}) + PRESS_TAB
    done = subprocess.run(
        ["bash", "--norc", "-c", lines, "bash", "headrace", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def test_every_command_and_every_option_is_offered(parser: argparse.ArgumentParser) -> None:
    (verbs,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    assert set(offered(parser, "")) == {*verbs, "-h", "--help", "--version"}
    for verb in ("up", "chat", "logs"):
        shown = {s for a in verbs[verb]._actions if a.help != argparse.SUPPRESS for s in a.option_strings}
        assert set(offered(parser, verb, "-")) == shown
    assert "--keep-alive-s" in offered(parser, "run", "a-model", "--")
    assert "--beat-interval-ms" not in offered(parser, "up", "--")  # an old name


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("ch",), ["chat"]),
        (("up", "--backend", ""), ["auto", "torch", "dummy", "sim"]),
        (("up", "--model", "x", "--log-level", "w"), ["warning"]),
        (("up", "--model", ""), []),  # the shell offers files
        (("config", "sh"), ["show"]),
        (("bench", "co"), ["compare"]),
        (("bench", "run", "--workload", "rand"), ["random"]),
        (("nonsense", "--back"), []),
    ],
)
def test_completion_offers_the_words_that_may_follow(
    parser: argparse.ArgumentParser, words: tuple[str, ...], found: list[str]
) -> None:
    assert offered(parser, *words) == found


def test_completion_is_the_same_function_in_both_shells(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    bash, zsh = (script(shell, parser, {}) for shell in SHELLS)
    function = bash.partition("\n_headrace() {")[0]
    assert zsh.startswith(f"#compdef headrace\n{function}")
    done = subprocess.run(
        ["sh", "-c", f"{function}\n_headrace_following replay --policy"],  # no feature of one shell alone
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")
    assert main(["completion", "zsh"]) == 0
    assert "compdef _headrace headrace" in capsys.readouterr().out
