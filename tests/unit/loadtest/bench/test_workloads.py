"""What the load client sends, and when: arrivals, lengths, prefixes, traces. Same seed, same requests."""

from __future__ import annotations

import math
import random
from itertools import accumulate
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import pytest

from loadtest.bench.arrivals import arrivals_us, surge
from loadtest.bench.asked import Conversation, Options, Turn, body_of
from loadtest.bench.prompts import Prompts
from loadtest.bench.repeats import Known, pieces
from loadtest.bench.replay import drawn
from loadtest.bench.run import Asked
from loadtest.bench.shape import Shape
from loadtest.bench.workloads import WORKLOADS
from shared.errors import BadRequest


def gaps(times: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *times], times, strict=False)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed_and_end_on_time(burstiness: float) -> None:
    times = arrivals_us(20_000, 50.0, burstiness, "7")
    assert times == sorted(times)
    assert times[-1] == 20_000 / 50 * 1_000_000
    spread = pstdev(gaps(times)) / mean(gaps(times))
    assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)  # of a gamma distribution


def test_seeds_decide_the_workload() -> None:
    assert arrivals_us(100, 5.0, 1.0, "a") == arrivals_us(100, 5.0, 1.0, "a")
    assert arrivals_us(100, 5.0, 1.0, "a") != arrivals_us(100, 5.0, 1.0, "b")


def test_a_fixed_rate_and_all_at_once() -> None:
    assert arrivals_us(4, 2.0, math.inf, "") == [500_000, 1_000_000, 1_500_000, 2_000_000]
    assert arrivals_us(3, math.inf, 1.0, "") == [0, 0, 0]
    assert arrivals_us(0, 2.0, 1.0, "") == []


def test_a_surge_is_in_the_middle_third() -> None:
    assert surge([100, 200, 300, 400, 500, 600], 4.0) == [100, 200, 225, 250, 350, 450]


def conversations(workload: str, seed: int = 1, chat: bool = False, **shape: Any) -> list[Conversation]:
    return Asked(workload, Shape(**shape), seed, chat).conversations(0)


def prompt_of(conversation: Conversation, turn: int = 0) -> Any:
    prompt = conversation.turns[turn].prompt
    return prompt() if callable(prompt) else prompt


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_makes_the_same_requests_and_a_point_its_own(workload: str) -> None:
    asked = Asked(workload, Shape(prompts=20, prefix_len=3, range_ratio=0.5), seed=3)
    assert asked.conversations(0) == asked.conversations(0)
    assert asked.conversations(0) != asked.conversations(1)
    assert len(asked.conversations("warm")) == 20


def test_random_lengths_are_uniform_around_theirs() -> None:
    made = conversations("random", prompts=2_000, input_len=100, output_len=10, range_ratio=0.5)
    lengths = [len(prompt_of(each)) for each in made]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert mean(lengths) == pytest.approx(100, rel=0.02)
    assert {each.turns[0].output_tokens for each in made} == set(range(5, 16))
    assert {each.at_us for each in made} == {None}
    assert all(300 <= token < 40_000 for each in made for token in prompt_of(each))


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    made = conversations("shared-prefix", prompts=12, input_len=20, prefix_len=30, prefixes=4)
    prompts = [prompt_of(each) for each in made]
    assert {len(prompt) for prompt in prompts} == {50}
    assert [prompt[:30] for prompt in prompts[:4]] * 3 == [prompt[:30] for prompt in prompts]
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 4
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 12
    (first, *others) = (prompt_of(each) for each in conversations("random", prompts=3, prefix_len=30))
    assert all(other[:30] == first[:30] for other in others)


def test_text_may_stand_in_place_of_token_ids() -> None:
    made = conversations("shared-prefix", chat=True, prompts=8, input_len=20, prefix_len=30, prefixes=2)
    prompts = [prompt_of(each).split() for each in made]
    assert {len(prompt) for prompt in prompts} == {50}
    assert prompts[0][:30] == prompts[2][:30] != prompts[1][:30]


def test_sharegpt_has_the_means_of_the_paper() -> None:
    turns = [each.turns[0] for each in conversations("sharegpt", prompts=5_000)]
    inputs = [len(turn.prompt) for turn in turns if not callable(turn.prompt)]
    assert mean(inputs) == pytest.approx(161, rel=0.06)
    assert mean(turn.output_tokens for turn in turns) == pytest.approx(338, rel=0.06)
    scaled = conversations("sharegpt", prompts=2_000, length_scale=0.1)
    assert mean(each.turns[0].output_tokens for each in scaled) == pytest.approx(34, rel=0.08)


def test_a_long_prompt_now_and_then() -> None:
    made = conversations(
        "long-beside-chat", prompts=9, input_len=8, long_len=500, long_every=4, output_len=64
    )
    assert [(each.turns[0].kind, len(prompt_of(each))) for each in made] == [
        *[("short", 8)] * 3, ("long", 500), *[("short", 8)] * 3, ("long", 500), ("short", 8)
    ]  # fmt: skip
    assert made[3].turns[0].output_tokens == 8


def test_classes_are_mixed_by_their_shares() -> None:
    made = conversations("priority", prompts=300, input_len=10, output_len=5)
    sizes = {(t.slo_class, t.kind, len(prompt_of(c)), t.output_tokens) for c in made for t in c.turns}
    assert sizes == {("interactive",) * 2 + (10, 5), ("standard",) * 2 + (10, 5), ("batch",) * 2 + (40, 20)}
    batch = sum(each.turns[0].slo_class == "batch" for each in made)
    assert 70 < batch < 130


def test_the_azure_sample_by_its_own_times_and_lengths() -> None:
    made = Asked("azure", Shape(prompts=50, length_scale=0.5), speed=2.0).conversations(0)
    assert [each.at_us for each in made[:2]] == [0, 4_314_579 // 2]
    assert [len(prompt_of(each)) for each in made[:2]] == [187, 198]
    assert [each.turns[0].output_tokens for each in made[:2]] == [22, 54]  # of 44 and 109
    assert len(made) == 50
    assert prompt_of(made[0])[:16] != prompt_of(made[1])[:16]  # no prefix is shared


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_the_mooncake_sample_shares_the_blocks_of_its_hash_ids(scale: float) -> None:
    made = Asked("mooncake", Shape(prompts=2, length_scale=scale)).conversations(0)
    one, other = (prompt_of(each) for each in made)
    assert (len(one), len(other)) == (round(6_758 * scale), round(7_322 * scale))
    shared = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert shared == pytest.approx(round(512 * scale), abs=1)  # [0, 1, …] and [0, 14, …]
    assert prompt_of(made[0]) == one


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"none\.csv is no file: give a trace with --trace"):
        Asked("azure", trace=tmp_path / "none.csv").conversations(0)


def test_a_prompt_longer_than_its_pieces_goes_on_by_itself() -> None:
    assert pieces(["a", "b"], 6, 4) == [("a", 4), ("b", 2)]
    assert pieces(["a", "b"], 11, 4) == [("a", 4), ("b", 4), ("b rest", 3)]
    assert pieces(["a", "b"], 3, 4) == [("a", 3)]
    short, long = (drawn(pieces(["a", "b"], tokens, 4), (5, 9_000))() for tokens in (6, 11))
    assert isinstance(long, list)
    assert (len(short), len(long)) == (6, 11)
    assert short == long[:6]


@pytest.mark.parametrize(("scale", "block_tokens"), [(1.0, 16), (0.1, 16), (0.03, 8)])
def test_repeated_tokens_of_a_trace_equal_the_common_prefixes_of_its_prompts(
    scale: float, block_tokens: int
) -> None:
    """Against the prompts themselves: every prefix of whole blocks, in a set."""
    shape = Shape(prompts=60, length_scale=scale, block_tokens=block_tokens)
    seen: set[int] = set()
    repeated = []
    for conversation in Asked("mooncake", shape).conversations(0):
        prompt = prompt_of(conversation)
        blocks = (tuple(prompt[at : at + block_tokens]) for at in range(0, len(prompt), block_tokens))
        _, *prefixes = accumulate(blocks, lambda before, block: hash((before, block)), initial=0)
        found = next((i for i, prefix in enumerate(prefixes[:-1]) if prefix not in seen), len(prefixes) - 1)
        seen.update(prefixes)
        assert conversation.turns[0].repeated_tokens == found * block_tokens
        repeated.append(found)
    assert sum(repeated) > 50
    for conversation in Asked("azure", Shape(prompts=20)).conversations(0):
        assert conversation.turns[0].repeated_tokens == 0


def test_the_last_token_of_a_prompt_is_never_a_repetition() -> None:
    known = Known(4)
    twice = [known.add(pieces(["a", "b"], 8, 4)) for _ in range(2)]
    assert twice == [0, 4]
    assert known.add(pieces(["a", "b", "c"], 9, 4)) == 8
    assert known.add(pieces(["z"], 1, 4)) == 0


def test_a_later_point_and_the_warm_up_find_nothing_of_an_earlier_one() -> None:
    asked = Asked("mooncake", Shape(prompts=1, length_scale=0.1))
    starts = {tuple(prompt_of(asked.conversations(part)[0])[:8]) for part in ("warm", 0, 1)}
    assert len(starts) == 3


def test_the_body_of_a_completion_and_of_a_chat() -> None:
    options = Options(extra=(("top_p", 0.9), ("temperature", 1)))
    assert body_of(Turn([1, 2], 8, slo_class="batch"), [], options) == {
        "prompt": [1, 2], "max_tokens": 8, "temperature": 1, "ignore_eos": True, "slo_class": "batch",
        "top_p": 0.9,
    }  # fmt: skip
    messages = [{"role": "system", "content": "s"}]
    assert body_of(Turn("hello", 8), messages, Options(ignore_eos=False)) == {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    assert len(messages) == 2  # and is reported from now on


def test_words_and_numbers_come_from_one_generator() -> None:
    one, other = (Prompts(random.Random(5)) for _ in range(2))
    assert (one.words(3), one.numbers(3)) == (other.words(3), other.numbers(3))
