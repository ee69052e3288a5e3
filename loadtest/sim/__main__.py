"""The command line of the simulator bench."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.sim import grid, plots
from loadtest.sim.run import run
from loadtest.sim.scenarios import SCENARIOS, Arm, Options, Scenario
from loadtest.sim.tables import document, markdown
from shared.errors import HeadraceError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a scenario and print its table; with --json also write it, its Markdown and its picture."""
    args = sys.argv[1:] if argv is None else list(argv)
    given = _parser().parse_args(args)
    options = Options(given.trace, given.minutes, given.speed, given.seed)
    command = " ".join(["python -m loadtest.sim", *_public(args)])
    try:
        if given.scenario == "grid":
            result, text = grid.run(command, MODES if not given.overlap else (given.overlap,))
        else:
            scenario = _narrowed(SCENARIOS[given.scenario], given)
            result = document(given.scenario, scenario, command, run(scenario, options))
            text = markdown(result, scenario)
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return 1
    print(text)
    if given.json:
        _write(result, text, given.json)
    return 0


MODES = ("single", "run_ahead", "two_batch", "auto")


def _narrowed(scenario: Scenario, given: argparse.Namespace) -> Scenario:
    """The scenario with the arms that the command line asks for."""
    arms = scenario.arms
    if given.policy is not None:
        arms = (Arm(given.policy or "default", given.policy),)
    if given.arms:
        arms = tuple(arm for arm in arms if arm.name in given.arms.split(","))
    if given.overlap:
        arms = tuple(replace(arm, overlap=given.overlap) for arm in arms)
    return replace(scenario, arms=arms)


def _write(result: dict[str, Any], text: str, path: Path) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(text)
    if result["scenario"] == "grid":
        grid.draw(result, path.with_suffix(".png"))
    elif SCENARIOS[result["scenario"]].plot:
        plots.bars(result, SCENARIOS[result["scenario"]].plot, path.with_suffix(".png"))


def _public(args: list[str]) -> list[str]:
    """The arguments without the folders of this machine."""
    return [Path(a).name if a.startswith("/") else a for a in args]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.sim", description=__doc__)
    parser.add_argument("scenario", choices=[*SCENARIOS, "grid"])
    parser.add_argument("--arms", default="", help="only these arms, by name, with commas")
    parser.add_argument("--policy", help="one arm alone: parts of the setting `policy`")
    parser.add_argument("--overlap", default="", help="this overlap mode in every arm")
    parser.add_argument("--trace", type=Path, help="a whole trace; a sample of it comes with the tests")
    parser.add_argument("--minutes", type=float, default=1e9, help="of the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="so many times as fast as recorded")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write this file, and .md and .png beside it")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
