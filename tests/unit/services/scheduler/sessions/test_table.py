"""The bounds of the table of sessions, and which of their blocks are shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.sessions import table
from services.scheduler.sessions.match import Prefixes
from services.scheduler.sessions.table import SHARED_AT, Session, Table, Tip
from services.scheduler.state.state import Chain
from shared.kv_blocks import KEY_BYTES
from shared.messages import ints

ROOT = (b"r" * KEY_BYTES, 4)


def keys(*parts: tuple[str, int]) -> bytes:
    """Keys of a chain: a part is a name and so many blocks."""
    chain, seen = [], ""
    for name, count in parts:
        for at in range(count):
            seen = f"{seen[-20:]}{name}{at}"[-KEY_BYTES:]
            chain.append(seen.rjust(KEY_BYTES, ".").encode())
    return b"".join(chain)


def begun(of: Table, name: str, tenant: str = "t", *, proven: bool = True) -> Session:
    session = Session(name, tenant, ROOT, is_proven=proven)
    assert not list(of.add(session))
    of.rest(session)
    return session


def test_shared_prefix_is_no_ones_own() -> None:
    of = Table()
    one, two = begun(of, "1"), begun(of, "2")
    of.set_keys(one, keys(("system", 40), ("one", 40)))
    assert of.own_from(one) == SHARED_AT - 1  # the first counted key; those before it may be shared
    of.set_keys(two, keys(("system", 40), ("two", 60)))
    assert of.own_from(one) == of.own_from(two) == 3 * SHARED_AT - 1  # the first counted key after 40
    of.remove(two)
    assert of.own_from(one) == 3 * SHARED_AT - 1  # another session may share what two have shared
    of.remove(one)
    assert (of.shares, of.key_bytes, of.tenants, of.by_name) == ({}, 0, {}, {})


def test_common_blocks_end_where_the_chains_differ() -> None:
    session = Session("1", "t", ROOT, chain=Chain(keys(("a", 10), ("b", 5))))
    other = keys(("a", 10), ("c", 9))
    chain = [other[at : at + KEY_BYTES] for at in range(0, len(other), KEY_BYTES)]
    assert session.common_blocks(chain) == 10
    assert session.common_blocks([session.key(at) for at in range(15)]) == 15
    assert session.common_blocks([]) == 0


def test_guess_goes_before_a_session_that_was_idle_for_longer() -> None:
    of = Table()
    for number in range(table.MOST_SESSIONS - 1):
        begun(of, f"s{number}")
    begun(of, "guess", proven=False)
    (over,) = of.add(Session("new", "t", ROOT))
    assert over.name == "guess"
    (over,) = of.add(Session("newer", "t", ROOT))
    assert over.name == "s0"
    assert len(of.by_name) == table.MOST_SESSIONS


def test_tenant_has_its_part_and_no_more() -> None:
    of = Table()
    for number in range(8):
        begun(of, f"of{number}", f"t{number}")
    for number in range(2 * table.MOST_OF_TENANT):
        for over in of.add(Session(f"s{number}", "t0", ROOT)):
            assert over.tenant == "t0"
        of.rest(of.by_name[f"s{number}"])
    assert of.tenants["t0"].count == table.MOST_OF_TENANT
    assert all(of.tenants[f"t{number}"].count == 1 for number in range(1, 8))


def test_running_session_is_never_taken_out_for_room() -> None:
    of = Table()
    begun(of, "other", "u")
    for number in range(table.MOST_SESSIONS - 1):
        assert not list(of.add(Session(f"s{number}", "t", ROOT)))
    (over,) = of.add(Session("one more", "t", ROOT))
    assert over.name == "other"


def test_keys_are_bounded() -> None:
    of = Table()
    begun(of, "long")
    of.set_keys(of.by_name["long"], bytes(table.MOST_KEY_BYTES + KEY_BYTES))
    (over,) = of.add(Session("new", "t", ROOT))
    assert (over.name, of.key_bytes) == ("long", 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 70)), max_size=30))
def test_counts_of_shared_keys_and_tips_equal_a_recount(steps: list[tuple[int, int, int]]) -> None:
    of = Table()
    for number, branch, blocks in steps:
        name = f"{number}"
        session = of.by_name.get(name) or begun(of, name)
        if not blocks:
            of.remove(session)
            continue
        chain = keys(("system", min(blocks, 20)), (f"b{branch}", max(blocks - 20, 0)))
        of.set_keys(session, chain)
        tip = Tip(blocks, bytes([branch, blocks]), bytes([blocks // 64]))
        of.set_tips(session, [*session.tips, tip] if tip not in session.tips else session.tips)
        of.set_seqs(session, [number, 10 + number])
    counted: dict[bytes, int] = {}
    for session in of.by_name.values():
        for at in range(SHARED_AT, session.blocks + 1, SHARED_AT):
            counted[session.key(at - 1)] = counted.get(session.key(at - 1), 0) + 1
    assert of.shares == counted
    assert of.key_bytes == sum(len(s.keys) for s in of.by_name.values())
    assert of.by_seq == {seq: s for s in of.by_name.values() for seq in s.seqs}
    index = of.tips.get(ROOT)
    for digest, name in index.sessions.items() if index else ():
        assert any(tip.digest == digest for tip in of.by_name[name].tips)
    borders = sum(sum(counts.values()) for counts in index.borders.values()) if index else 0
    assert borders == (len(index.sessions) if index else 0)


def test_prompt_continues_the_session_with_the_deepest_tip() -> None:
    of = Table()
    prompt = ints(number * 7 % 1_000 for number in range(4 * 200))
    for name, blocks in (("short", 10), ("border", 64), ("long", 150), ("other", 199)):
        session = begun(of, name)
        tokens = prompt if name != "other" else ints([5] * len(prompt))
        of.set_tips(session, [Prefixes(ROOT, tokens, 199).tip(blocks)])
    for blocks, found in ((199, ("long", 150)), (149, ("border", 64)), (63, ("short", 10)), (9, ("", 0))):
        assert Prefixes(ROOT, prompt, blocks).find(of) == found
    assert Prefixes((b"another", 4), prompt, 199).find(of) == ("", 0)


def test_later_session_with_the_same_tip_is_the_one_that_is_found() -> None:
    of = Table()
    tip = Prefixes(ROOT, ints(range(40)), 10).tip(9)
    one, two = begun(of, "1"), begun(of, "2")
    of.set_tips(one, [tip])
    of.set_tips(two, [tip])
    assert Prefixes(ROOT, ints(range(40)), 10).find(of) == ("2", 9)
    of.remove(one)
    assert Prefixes(ROOT, ints(range(40)), 10).find(of) == ("2", 9)
    of.remove(two)
    assert of.tips == {}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_sessions_with_one_prompt_end_in_any_order(order: tuple[int, int]) -> None:
    of = Table()
    both = begun(of, "1"), begun(of, "2")
    for session in both:
        of.set_tips(session, [Tip(3, b"d", b"b")])
    for number in order:
        of.remove(both[number])
    assert (of.tips, of.by_name) == ({}, {})
