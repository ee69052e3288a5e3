"""Which scheduler a request goes to: by its prefix, in proportion to the executors, past crowded ones."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.text_models import served

from services.tokenizer.core import Loads, Schedulers, Send, TokenizerCore
from services.tokenizer.prepare import Prepared, ServedModel
from shared.actor.membership import BOUND, SLACK, Peers
from shared.kv_blocks import rendezvous
from shared.messages import Heartbeat, Rejected, Tokenized

NAMES = ("s1", "s2", "s3", "s4")
ASKED = Tokenized(request="r", attempt=1, tenant="t", model="tiny", inbox="i", timeout_us=60_000_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served(tmp_path_factory.mktemp("choice"))


def tokenizer(model: ServedModel, schedulers: Sequence[str], loads: Loads) -> TokenizerCore:
    core = TokenizerCore(model)
    core.handle(Schedulers(tuple(schedulers)), 0)
    core.handle(loads, 0)
    return core


def choice(core: TokenizerCore, request: str, key: str) -> str:
    asked = dataclasses.replace(ASKED, request=request, routing_key=key)
    (command,) = core.handle(Prepared("i", request, asked), 1)
    assert isinstance(command, Send)
    return command.scheduler


def choices(core: TokenizerCore, count: int) -> dict[str, str]:
    return {f"k{i}": choice(core, f"r{i}", f"k{i}") for i in range(count)}


def test_tokenizers_choose_the_same_scheduler_for_a_key_at_any_id(model: ServedModel) -> None:
    loads = Loads({"s1": 1, "s2": 3}, ("s3",))
    one, other = (tokenizer(model, order, loads) for order in (NAMES, NAMES[::-1]))
    assert choices(one, 64) == {key: choice(other, f"x{key}", key) for key in (f"k{i}" for i in range(64))}


def test_id_chooses_the_scheduler_without_a_key(model: ServedModel) -> None:
    """A tokenizer of an earlier version sends none."""
    assert choice(tokenizer(model, NAMES, Loads({})), "r7", "") == rendezvous("r7", NAMES)


@given(joining=st.sampled_from(NAMES), executors=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3)))
def test_only_keys_of_the_one_that_joins_or_leaves_move(
    model: ServedModel, joining: str, executors: dict[str, int]
) -> None:
    others, loads = [name for name in NAMES if name != joining], Loads(executors)
    before, after = choices(tokenizer(model, others, loads), 80), choices(tokenizer(model, NAMES, loads), 80)
    moved = {key for key in before if after[key] != before[key]}
    assert {after[key] for key in moved} <= {joining}
    share = executors.get(joining, 1) / sum(executors.get(name, 1) for name in NAMES)
    assert len(moved) <= 80 * share + 4 * (80 * share * (1 - share)) ** 0.5


def test_keys_are_divided_as_executors_are(model: ServedModel) -> None:
    shares = Counter(choices(tokenizer(model, ("s1", "s2"), Loads({"s1": 3, "s2": 1})), 1_000).values())
    assert shares["s1"] == pytest.approx(750, abs=60)


@given(crowded=st.sets(st.sampled_from(NAMES)))
def test_a_crowded_one_is_passed_over_for_the_second_choice_alone(
    model: ServedModel, crowded: set[str]
) -> None:
    calm = choices(tokenizer(model, NAMES, Loads({})), 40)
    left = [name for name in NAMES if name not in crowded] or NAMES
    for key, chosen in choices(tokenizer(model, NAMES, Loads({}, tuple(crowded))), 40).items():
        assert chosen == rendezvous(key, left)
        assert chosen == calm[key] or calm[key] in crowded


def test_crowded_scheduler_is_tried_if_all_others_have_refused(model: ServedModel) -> None:
    core = tokenizer(model, ("s1", "s2"), Loads({}, ("s1",)))
    assert choice(core, "r", "key") == "s2"
    refused = Rejected(tenant="t", request="r", attempt=1, code=503, message="no executor is ready")
    (again,) = core.handle(refused, 2)
    assert isinstance(again, Send)
    assert again.scheduler == "s1"


def fleet(*schedulers: tuple[int, int, int]) -> Peers:
    """Schedulers s0, s1, … with so many executors, running and waiting requests."""
    peers = Peers()
    for i, (executors, running, waiting) in enumerate(schedulers):
        base = Heartbeat(kind="scheduler", actor=f"s{i}", host_id="h", state="ready", model="m")
        load = (("requests", 999), ("running", running), ("waiting", waiting))
        peers.update(1, dataclasses.replace(base, load=load), 0)
        for j in range(executors):
            name = f"e{i}.{j}"
            peers.update(1, dataclasses.replace(base, kind="executor", actor=name, scheduler=f"s{i}"), 0)
    return peers


@pytest.mark.parametrize(
    ("schedulers", "crowded"),
    [
        ([(1, 8, 0), (1, 0, 0)], []),
        ([(1, 2 * SLACK, 0), (1, 0, 0)], []),
        ([(1, 2 * SLACK, 1), (1, 0, 0)], ["s0"]),
        ([(1, 100, 25), (1, 75, 0)], []),
        ([(1, 100, 26), (1, 74, 0)], ["s0"]),
        ([(2, 200, 0), (1, 100, 0)], []),
        ([(3, 200, 0), (1, 100, 0)], ["s1"]),
        ([(1, 500, 0), (0, 0, 0)], []),
        ([(0, 500, 0), (0, 0, 0)], []),
        ([], []),
    ],
    ids=str,
)
def test_crowded_is_a_quarter_over_the_mean_and_more_than_chance(
    schedulers: list[tuple[int, int, int]], crowded: list[str]
) -> None:
    assert fleet(*schedulers).crowded("m") == crowded


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300), st.integers(0, 300)), max_size=6))
def test_one_is_always_left_and_none_is_crowded_within_the_bound(rows: list[tuple[int, int, int]]) -> None:
    peers = fleet(*rows)
    serving, crowded = peers.serving("m"), peers.crowded("m")
    assert set(crowded) <= set(serving)
    assert len(crowded) < max(len(serving), 1)
    served = [row for row in rows if row[0]]
    mean = sum(r + w for _, r, w in served) / max(sum(e for e, _, _ in served), 1)
    for name in crowded:
        executors, running, waiting = rows[int(name[1:])]
        assert running + waiting > BOUND * mean * executors
