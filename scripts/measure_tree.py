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
from test_layout import budgets, rooms, the_product  # noqa: E402


def main() -> None:
    """Print three tables."""
    lines, limits = the_product(), budgets()
    print(f"{'room':34} {'lines':>7} {'files':>6}   at most")
    for room, counts in sorted(rooms().items()):
        files, most = limits.get(room, (0, 0))
        limit = f"{most:,} lines, {files} files" if most else f"{files} files" if files else "no limit"
        print(f"{room:34} {sum(counts):7,} {len(counts):6}   {limit}")
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
