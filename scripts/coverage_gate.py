"""Coverage of shared/ and of the pure cores must not fall below 95 %.

Shells, engines and the launcher run in processes of their own in the end-to-end tests, where
coverage does not see them; they are held by those tests instead.
"""

from __future__ import annotations

import json
import sys

FLOOR_PERCENT = 95.0
CORES = ("shared/", "services/scheduler/", "services/kv_offload/")
CORE_FILES = (
    "services/tokenizer/core.py",
    "services/tokenizer/prepare.py",
    "services/tokenizer/structured_output.py",
    "shared/openai/call.py",
    "services/gateway/openai_response.py",
    "services/detokenizer/core.py",
    "services/detokenizer/text.py",
    "services/detokenizer/response.py",
)


def main(report: str) -> int:
    """Print the share of covered lines of the cores; 1 when it is below the floor."""
    with open(report) as file:
        files = json.load(file)["files"]
    chosen = {name: data["summary"] for name, data in files.items() if name.startswith(CORES)}
    chosen |= {name: data["summary"] for name, data in files.items() if name in CORE_FILES}
    missing_files = [name for name in CORE_FILES if name not in files]
    covered = sum(summary["covered_lines"] for summary in chosen.values())
    missing = sum(summary["missing_lines"] for summary in chosen.values())
    percent = 100 * covered / (covered + missing)
    print(f"coverage of shared/ and the cores: {percent:.1f} % of lines in {len(chosen)} files")
    if missing_files:
        print(f"not in the report: {missing_files}")
    return 1 if percent < FLOOR_PERCENT or missing_files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
