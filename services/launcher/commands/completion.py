"""Prints a script that completes command lines in bash or zsh, made from the argument parsers themselves.

The script knows the options and subcommands of each command, and the alternatives of an option. For every
other word the shell completes file names.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence

from services.launcher.console import load_test_module
from shared.errors import did_you_mean

SHELLS = ("bash", "zsh")

# Prints what may follow the words of its arguments, one a line. `at` is the command with a blank before each
# word; zsh has other uses for `path` and `words`.
_FOLLOWING = """\
_headrace_following() {
    local at= last= word
    for word; do
        last="$word"
        case "$at $word" in
COMMANDS) at="$at $word" ;;
        esac
    done
    case "$at,$last" in
ALTERNATIVES
    *) case "$at" in
OPTIONS
    esac ;;
    esac
}
"""
_COMPLETE = {
    "bash": """\
_headrace() {
    local before=("${COMP_WORDS[@]:1:COMP_CWORD-1}")
    COMPREPLY=($(compgen -W "$(_headrace_following "${before[@]}")" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _headrace headrace
""",
    "zsh": """\
_headrace() {
    local -a found
    found=(${(f)"$(_headrace_following "${(@)words[2,CURRENT-1]}")"})
    compadd -a found || _files
}
if [[ $funcstack[1] == _headrace ]]; then  # loaded from the fpath by the first completion
    _headrace
else
    compdef _headrace headrace
fi
""",
}


def script(shell: str, top: argparse.ArgumentParser, programs: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script for one of SHELLS. `programs` are the parsers of commands that pass their words on."""
    options = dict(_options(top, ""))
    for name, parser in programs.items():
        options |= _options(parser, f" {name}")
    alternatives = dict(_alternatives(top, ""))
    for name, parser in programs.items():
        alternatives |= _alternatives(parser, f" {name}")
    commands = "|".join(f'"{at}"' for at in options if at)
    filled = _FOLLOWING.replace("COMMANDS", f"            {commands}")
    filled = filled.replace("ALTERNATIVES", _cases(alternatives)).replace("OPTIONS", _cases(options))
    head = "#compdef headrace\n" if shell == "zsh" else ""  # for a file on zsh's fpath
    return head + filled + _COMPLETE[shell]


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> None:
    programs = {name: load_test_module(name).parser() for name in given.programs}
    print(script(given.shell, given.every_command(), programs), end="")


def proposal(complaint: str, words: Sequence[str], top: argparse.ArgumentParser) -> str:
    """The end of argparse's complaint about a command line: the word that it may mean, empty if unknown."""
    found = re.search(r"invalid choice: '(.*?)' \(|unrecognized arguments: (--[\w-]+)", complaint)
    if found is None:
        return ""
    known = dict(_options(top, ""))
    return did_you_mean(found[1] or found[2], known.get(f" {words[0]}", known[""]))


def _options(parser: argparse.ArgumentParser, at: str) -> Iterator[tuple[str, list[str]]]:
    """For each command from `at` on: its options, its subcommands, the alternatives of its arguments."""
    words: list[str] = []
    for action in _shown(parser):
        words += action.option_strings or map(str, action.choices or ())
        if isinstance(action.choices, dict):
            for name, sub in action.choices.items():
                yield from _options(sub, f"{at} {name}")
    yield at, words


def _alternatives(parser: argparse.ArgumentParser, at: str) -> Iterator[tuple[str, list[str]]]:
    """For each option with a value, as "COMMAND,OPTION": the alternatives; none: it may be a file."""
    for action in _shown(parser):
        if isinstance(action.choices, dict):
            for name, sub in action.choices.items():
                yield from _alternatives(sub, f"{at} {name}")
        elif action.nargs != 0:
            words = _braced(action) if action.choices is None else [str(choice) for choice in action.choices]
            yield from ((f"{at},{option}", words) for option in action.option_strings)


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def _braced(action: argparse.Action) -> list[str]:
    """The alternatives of a setting, which are in its metavar: {auto,torch,dummy,sim}."""
    metavar = str(action.metavar or "")
    return metavar[1:-1].split(",") if metavar.startswith("{") else []


def _cases(words: Mapping[str, list[str]]) -> str:
    """A line for each list of words, with all commands that it follows."""
    same: dict[str, list[str]] = {}
    for at, found in words.items():
        same.setdefault(" ".join(found), []).append(f'"{at}"')
    lines = {found: f"    {'|'.join(ats)})" for found, ats in same.items()}
    return "\n".join(
        f"{at} printf '%s\\n' {found} ;;" if found else f"{at} ;;" for found, at in lines.items()
    )
