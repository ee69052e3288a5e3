"""Prints the size of the product: lines and files by room, the largest folder, the one path, and the files
that a newcomer opens for each question.

    python scripts/measure_tree.py
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "rules")]

from support.questions import QUESTIONS  # noqa: E402 - the path comes first
from test_layout import on_the_path, the_product  # noqa: E402

GOALS = {"product": (38_000, 185), "the one path": (15_000, 60)}


def main() -> None:
    """Print three tables."""
    lines = the_product()
    rooms: dict[str, list[int]] = {}
    for name, count in lines.items():
        parts = name.split("/")
        room = "/".join(parts[:2]) if parts[0] == "services" else parts[0]
        rooms.setdefault(room, []).append(count)
    path = [lines[name] for name in on_the_path()]
    rows = [(room, sum(counts), len(counts)) for room, counts in sorted(rooms.items())]
    rows += [("product", sum(lines.values()), len(lines)), ("the one path", sum(path), len(path))]
    print(f"{'room':24} {'lines':>7} {'files':>6}   goal")
    for room, count, files in rows:
        goal = "{:,} lines, {} files".format(*GOALS[room]) if room in GOALS else ""
        print(f"{room:24} {count:7,} {files:6}   {goal}")
    (folder, files), *_ = Counter(str(Path(name).parent) for name in lines).most_common(1)
    print(f"\nlargest folder: {folder}, {files} files (at most 20)")
    largest = max(lines, key=lambda name: lines[name])
    print(f"largest file: {largest}, {lines[largest]} lines (at most 850)\n")
    for question in QUESTIONS:
        files = len({part.split(":")[0] for part in question.answer})
        print(f"{question.text}: {files} files (at most {question.limit})")
        for part in question.answer:
            print("    " + part.replace(":", "  "))


if __name__ == "__main__":
    main()
