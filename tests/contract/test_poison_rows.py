"""The content of a sequence is its own error: HEADRACE_POISON_ROWS hostile rows, on a GPU if there is one."""

from __future__ import annotations

import json
import os

import pytest
from support.executor import poison_rows
from support.executor.gpu_side import DEVICE

ROWS = int(os.environ.get("HEADRACE_POISON_ROWS", "1000"))


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, object], list[str]]:
    return poison_rows.report(DEVICE, ROWS, 7)


def test_no_hostile_row_changes_a_bystander_or_fails_a_step(
    found: tuple[dict[str, object], list[str]],
) -> None:
    summary, lines = found
    assert (summary["failed_steps"], summary["bystanders_changed"], summary["wrong"]) == ([], [], [])
    assert summary["clean"] is True
    assert (summary["rows"], len(lines)) == (ROWS, ROWS)
    assert summary["bystander_tokens"] == 4 * 8 * 2 * -(-ROWS // 2 // 24)


def test_the_draw_reaches_every_kind_of_error_and_many_answers(
    found: tuple[dict[str, object], list[str]],
) -> None:
    rows = [json.loads(line) for line in found[1]]
    errors = " ".join(row["errors"][0] for row in rows if row["errors"])
    for kind in (
        "logits of this sequence are not finite", "its penalties and logit_bias", "its sampling is not",
        "prompt: the weights have", "logit_bias: the weights have", "grammar: ", "processor absent",
    ):  # fmt: skip
        assert kind in errors
    answered = [row["asked"] for row in rows if not row["errors"]]
    assert len(answered) > ROWS // 3
    for field in ("temperature", "top_p", "min_p"):  # too small for float32
        assert any(0 < asked[field] < 1e-45 for asked in answered)


def test_a_bystander_that_changed_or_a_step_that_failed_shows() -> None:
    tally = poison_rows.Found()
    one, wrong = poison_rows.bystander(0), poison_rows.StepResult(
        exec_epoch=0, step=1, ids=poison_rows.ints([4]), done=poison_rows.ints([0])
    )  # fmt: skip
    poison_rows._note(tally, one, 0, [wrong], {0: [5]})
    poison_rows._note(tally, one, 0, [wrong], {0: [4]})
    assert (len(tally.changed), tally.compared) == (1, 2)
