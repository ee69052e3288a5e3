"""Faults of a host, in the middle of a fleet's work, with the real model.

    python -m loadtest.host_faults --out host_faults.json
    python -m loadtest.host_faults --cases model: link:
    python -m loadtest.host_faults --cases descriptors: -- --backend sim
    python -m loadtest.host_faults --list

A case is a fresh `headrace up` of SmolLM2 in float32 with two tokenizers and two detokenizers, six clients
that send as soon as they can and a durable request every second, before, during and after the fault. Every
answer is compared with those of undisturbed fleets. It needs root, for mounts, cgroups and limits of other
processes; what it mounts no other process sees. Flags after `--` replace the real engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.chaos import cells
from loadtest.chaos.cells import Answers, Shape, Span, target
from loadtest.command_line import parser_of
from loadtest.host_faults import place as places
from loadtest.host_faults import watch
from loadtest.host_faults.cases import CASES, Case
from loadtest.host_faults.place import Place

UP = ("--backend", "torch", "--dtype", "f32")
SHM_MIB, STATE_MIB, MODELS_MIB = 256, 192, 160
BEFORE = 8  # answers before a fault
AFTER_S = 4.0  # requests go on for so long after the recovery
LOG_LINES = 12


@contextmanager
def fleet(place: Place, flags: Sequence[str], executors: int = 1) -> Iterator[None]:
    """A fleet that serves what is in a place."""
    env = {"XDG_STATE_HOME": str(place.state)}
    shape = Shape((str(place.served),), executors=executors)
    with target(flags, str(place.log), watch.LIMIT_S, shape, env) as place.fleet:
        yield
    place.fleet = None


@contextmanager
def site(folder: Path, log: Path, given: str) -> Iterator[Place]:
    """A place with three model files, of which it serves the first as `given`."""
    place = Place(folder, log)
    with ExitStack() as stack:
        stack.enter_context(places.disk(folder / "state.img", place.state, STATE_MIB))
        if given == "disk":
            stack.enter_context(places.disk(folder / "models.img", place.models, MODELS_MIB))
        place.models.mkdir(exist_ok=True)
        if given == "link":
            place.served.symlink_to(folder / "first.gguf")
        else:
            shutil.copyfile(folder / "first.gguf", place.served)
        try:
            yield place
        finally:
            for path in place.models.iterdir():
                if not path.is_dir():
                    path.unlink()


def undisturbed(folder: Path, log: Path, up: Sequence[str]) -> list[Answers]:
    """The answers of each of the three models."""
    found = []
    for name in ("first", "other", "foreign"):
        with site(folder, log, "file") as place:
            shutil.copyfile(folder / f"{name}.gguf", place.served)
            with fleet(place, (*up, "--no-durable")):
                assert place.fleet is not None
                found.append(asyncio.run(watch.answers(place.fleet)))
    return found


def kept(out: Path | None, others: set[str]) -> list[dict[str, Any]]:
    """The rows that an earlier run has of `others`: the cases that do not run again."""
    found: list[dict[str, Any]] = json.loads(out.read_text())["cases"] if out and out.exists() else []
    return [row for row in found if row["cell"] in others]


def known(file: Path | None) -> list[Answers]:
    """The answers that an earlier run of this machine has kept."""
    kept: list[Answers] = pickle.loads(file.read_bytes()) if file is not None and file.exists() else []
    return kept


async def one(case: Case, place: Place, right: Sequence[Answers]) -> dict[str, Any]:
    """Do it, and count."""
    assert place.fleet is not None
    await cells.settled(place.fleet)
    traffic = watch.Traffic(place.fleet)
    await traffic.begin(BEFORE)
    span = Span(time.monotonic()) if "nats-server" in case.victims else Span()
    began_s = time.monotonic()
    facts = await case.fault(place)
    undone_s = time.monotonic()
    if "nats-server" in case.victims:
        span = replace(span, back_s=undone_s)
    recovery_s = await traffic.recovered(undone_s, case.within_s)
    if recovery_s is not None:
        await asyncio.sleep(AFTER_S)
    await traffic.end()
    counts = traffic.counts(case.name, case.victims, right, span)
    if case.within_s and not case.restarts:
        try:
            await cells.settled(place.fleet)
        except AssertionError as error:
            counts.held = str(error)
    if case.restarts:
        durable: dict[str, Any] = {
            "accepted": len(traffic.durable.accepted),
            "refused": traffic.durable.refused,
        }
    else:
        durable = await traffic.durable.judged(place.fleet.nats_url, right)
    row = counts.row() | {"fault_s": round(undone_s - began_s, 1), "recovery_s": recovery_s, **facts}
    row |= {"durable": durable, "_traffic": traffic}
    return row


def flaws(case: Case, row: dict[str, Any], place: Place) -> list[str]:
    """What must not be."""
    found = [f"{name} {row[name]}" for name in ("wrong", "doubled", "lost", "silent") if row[name]]
    refused = {key: n for key, n in row["messages"].items() if key.startswith(("refused", "odd", "lost"))}
    for key, count in refused.items():
        if not case.refuses:
            found.append(f"{count} × {key}")
        elif not any(cause in key for cause in case.causes):
            found.append(f"without the cause, {count} × {key}")
    if row["held"]:
        found.append(row["held"])
    if case.within_s and row["recovery_s"] is None:
        found.append(f"no answer within {case.within_s:g} s of its end")
    durable = row["durable"]
    found += [f"durable {name} {durable[name]}" for name in ("wrong", "lost", "silent") if durable.get(name)]
    if case.logged and not place.lines_with(case.logged):
        found.append(f"the log has not {case.logged!r}")
    return found


def case_of(
    case: Case, folder: Path, log: Path, right: Sequence[Answers], up: Sequence[str]
) -> dict[str, Any]:
    """One case in a fresh fleet, and its row."""
    flags = (*up, *case.up, "--durable")
    with site(folder, log, case.given) as place:
        with fleet(place, flags, case.executors):
            row = asyncio.run(one(case, place, right))
        traffic = row.pop("_traffic")
        if case.restarts:
            places.mend_disk(folder / "state.img", place.state)
            place.log = log.with_suffix(".again.log")
            with fleet(place, flags, case.executors):
                assert place.fleet is not None
                row["durable"] |= asyncio.run(traffic.durable.judged(place.fleet.nats_url, right))
            place.log = log
        row["flaws"] = flaws(case, row, place)
        header = [
            line
            for line in place.lines_with(" |")
            if any(w in line for w in (" warning", " error", " critical", "starts again", "killed", "Error:"))
        ]
        row["log"] = header[:LOG_LINES]
    return row


def main() -> int:
    """Run the cases; 1 when one of them has a flaw."""
    parser = parser_of("host_faults", __doc__, up=True)
    parser.add_argument("--cases", nargs="+", default=[""], help="those whose names start so")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--log", type=Path, help="a folder for the services' log of each case")
    parser.add_argument("--answers", type=Path, help="file that keeps the undisturbed answers for other runs")
    given = parser.parse_args()
    up = given.up or UP
    chosen = [case for case in CASES if case.name.startswith(tuple(given.cases))]
    if given.list:
        print("\n".join(case.name for case in chosen))
        return 0
    names = [case.name for case in CASES]
    places.enter()
    rows = kept(given.out, {*names} - {case.name for case in chosen})
    places.run("mount", "-t", "tmpfs", "-o", f"size={SHM_MIB}m", "tmpfs", "/dev/shm")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = given.log or folder
        log.mkdir(parents=True, exist_ok=True)
        places.write_models(folder)
        right = known(given.answers) or undisturbed(folder, log / "undisturbed.log", up)
        if given.answers is not None:
            given.answers.write_bytes(pickle.dumps(right))
        for number, case in enumerate(chosen):
            try:
                row = case_of(case, folder, log / f"{number}.log", right, up)
            except AssertionError as error:  # the fleet did not settle before the fault
                row = {"cell": case.name, "flaws": [str(error)]}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if given.out is not None:
                header = {"up": " ".join(up), "cores": os.cpu_count(), "shm_mib": SHM_MIB, "cases": rows}
                rows.sort(key=lambda row: names.index(row["cell"]))
                given.out.write_text(json.dumps(header, indent=1, ensure_ascii=False) + "\n")
    print(table(rows))
    return 1 if any(row["flaws"] for row in rows) else 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people, in Markdown."""
    names = ("requests", "right", "wrong", "doubled", "lost", "silent", "refused", "reset")
    lines: list[Sequence[str]] = [("case", *names, "recovery", "longest", "flaws")]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        if "requests" not in row:
            lines.append([row["cell"], *[""] * (len(names) + 2), "; ".join(row["flaws"])[:120]])
            continue
        recovery = "" if row["recovery_s"] is None else f"{row['recovery_s']:g} s"
        counted = [str(row[name]) for name in names]
        lines.append(
            [row["cell"], *counted, recovery, f"{row['longest_s']:g} s", "; ".join(row["flaws"])[:120]]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
