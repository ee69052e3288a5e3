"""The command line of the simulator bench."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loadtest.scenarios import grid
from loadtest.scenarios.definitions import SCENARIOS, Arm, Options, Scenario
from loadtest.scenarios.run import run
from loadtest.scenarios.tables import document, markdown
from shared.errors import HeadraceError, SetupError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a scenario and print its table; with --json also write it and its Markdown."""
    given = _parser().parse_args(argv)
    try:
        if given.scenario != "all":
            _one(given.scenario, given, given.json)
            return 0
        if given.json is None:
            raise SetupError("`all` writes files: give the place by --json FOLDER")
        for name in (*SCENARIOS, "grid"):
            _one(name, given, given.json / f"sim_{name.lower()}.json")
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _one(name: str, given: argparse.Namespace, path: Path | None) -> None:
    command = _command(name, given)
    if name == "grid":
        result, text = grid.run(command, (given.overlap,) if given.overlap else (*grid.MODES, "auto"))
    else:
        scenario = _narrowed(SCENARIOS[name], given)
        options = Options(given.trace, given.minutes, given.speed, given.seed)
        result = document(name, scenario, command, run(scenario, options))
        text = markdown(result, scenario)
    print(text, flush=True)
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(text)


def _narrowed(scenario: Scenario, given: argparse.Namespace) -> Scenario:
    """The scenario with the arms that the command line asks for."""
    arms = scenario.arms
    if given.policy is not None:
        arms = (Arm(given.policy or "default", given.policy),)
    if given.arms:
        arms = tuple(arm for arm in arms if arm.name in given.arms.split(","))
    if given.overlap:
        arms = tuple(replace(arm, overlap=given.overlap) for arm in arms)
    return replace(scenario, arms=arms, replicas=given.executors or scenario.replicas)


def _command(name: str, given: argparse.Namespace) -> str:
    """The command line that makes this table, without the folders of this machine."""
    words = ["python -m loadtest.scenarios", name]
    for option in ("arms", "policy", "overlap", "executors", "trace", "minutes", "speed", "seed"):
        value = getattr(given, option)
        if value != _parser().get_default(option):
            words += [f"--{option}", value.name if isinstance(value, Path) else f"{value}"]
    return " ".join(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.scenarios", description=__doc__)
    parser.add_argument("scenario", choices=[*SCENARIOS, "grid", "all"])
    parser.add_argument("--arms", default="", help="only these arms, by name, with commas")
    parser.add_argument("--policy", help="one arm alone: parts of the setting `policy`")
    parser.add_argument("--overlap", default="", help="this overlap mode in every arm")
    parser.add_argument("--executors", type=int, default=0, help="so many equal executors")
    parser.add_argument("--trace", type=Path, help="a whole trace; a sample of it comes with the tests")
    parser.add_argument("--minutes", type=float, default=1e9, help="of the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="so many times as fast as recorded")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write this file, .md beside it; all: a folder")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
