"""The table of `headrace usage`."""

from __future__ import annotations

from services.launcher.commands.status import Facts, by_tenant, table

NAMES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


def answer(model: str, **tenants: tuple[int, int, int, int]) -> Facts:
    usage = {tenant: dict(zip(NAMES, counts, strict=True)) for tenant, counts in tenants.items()}
    return {"kind": "scheduler", "model": model, "usage": usage}


def test_schedulers_of_a_model_are_added_up() -> None:
    services = [
        answer("m", acme=(2, 1_000, 10, 20), bob=(1, 5, 0, 1)),
        answer("m", acme=(3, 2_000, 0, 5)),
        answer("other", acme=(1, 1, 1, 1)),
        {"kind": "executor", "model": "m"},
    ]
    assert table(by_tenant(services)) == [
        "tenant  model  requests  prompt tokens  of them cached  completion tokens",
        "acme    m             5          3,000              10                 25",
        "acme    other         1              1               1                  1",
        "bob     m             1              5               0                  1",
        "all                   7          3,006              11                 27",
    ]


def test_one_line_needs_no_sum_and_none_is_a_head() -> None:
    assert len(table(by_tenant([answer("m", a=(1, 1, 1, 1))]))) == 2
    assert len(table(by_tenant([]))) == 1
