"""What readers leave unread is bounded: of each request, and of all requests of a tenant. A request waits for
services for some seconds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.memory_bus import MemoryBroker

from shared.client import client
from shared.client.client import TIMES_AGAIN, Client, NoAnswer, SlowReader, UnreadFrames, UnreadTotal
from shared.errors import Unavailable
from shared.nats.interface import NO_RESPONDERS, Delivery

FRAME = Delivery("inbox", b"x" * 100)


def stream(ended: list[str], name: str, pile: UnreadTotal) -> UnreadFrames:
    return UnreadFrames(lambda: ended.append(name), pile)


async def test_streams_of_a_tenant_that_reads_nothing_end_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "MAX_TENANT_BYTES", 1_000)
    ended: list[str] = []
    pile, other = UnreadTotal(), UnreadTotal()
    unread = [stream(ended, f"a{i}", pile) for i in range(4)]
    reads, theirs = stream(ended, "reads", pile), stream(ended, "b", other)
    for _ in range(20):
        for each in (*unread, reads, theirs):
            each.put(FRAME)
        await reads.get(1)
        await theirs.get(1)
        assert pile.size <= 1_200
    assert sorted(ended) == ["a0", "a1", "a2", "a3"]
    with pytest.raises(SlowReader, match="bytes of the answer waited to be read"):
        await unread[0].get(1)
    assert (pile.size, other.size) == (0, 0)


async def test_items_left_by_a_reader_count_no_more() -> None:
    pile = UnreadTotal()
    one, two = stream([], "one", pile), stream([], "two", pile)
    for _ in range(3):
        one.put(FRAME)
        two.put(FRAME)
    await one.get(1)
    one.close()
    assert (pile.streams, pile.size) == (1, 300)
    two.close()
    assert (pile.streams, pile.size) == (0, 0)


async def test_a_model_that_is_not_served_again_fails_later_requests_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request whose own time is over before that gets the same."""
    asker, sent, served = await Client.open(MemoryBroker().connect()), list[str](), True

    def publish(
        subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        sent.append(subject)
        if reply and served:
            asker._on_reply(Delivery(reply, b'{"text": "here"}'))
        elif reply:
            asker._on_reply(Delivery(reply, b"", headers={"Status": NO_RESPONDERS}))

    monkeypatch.setattr(asker.bus, "publish", publish)
    assert await asker.complete({"model": "m"}) == {"text": "here"}
    served = False
    with pytest.raises(Unavailable, match="no service answers for model 'm'") as caught:
        await asker.complete({"model": "m"}, timeout_s=0.01)
    assert (caught.value.retryable, caught.value.retry_after_ms) == (True, 1_000)
    monkeypatch.setattr(client, "AGAIN_S", 0.001)
    for times in (1 + TIMES_AGAIN, 1):
        sent.clear()
        with pytest.raises(Unavailable, match="no service answers for model 'm'"):
            await asker.complete({"model": "m"}, timeout_s=60)
        assert len(sent) == times


async def test_a_request_that_a_service_has_got_again_is_not_answered_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service is back and computes: "no service answers" would be another cause."""
    asker, sent = await Client.open(MemoryBroker().connect()), list[str]()

    def publish(
        subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        sent.append(subject)
        if reply and len(sent) == 1:
            asker._on_reply(Delivery(reply, b'{"text": "here"}'))
        elif reply and len(sent) == 2:
            asker._on_reply(Delivery(reply, b"", headers={"Status": NO_RESPONDERS}))

    monkeypatch.setattr(asker.bus, "publish", publish)
    monkeypatch.setattr(client, "AGAIN_S", 0.001)
    assert await asker.complete({"model": "m"}) == {"text": "here"}
    with pytest.raises(NoAnswer, match=r"no answer to request r within 0\.2 s"):
        await asker.complete({"model": "m", "request_id": "r"}, timeout_s=0.2)
    assert len([each for each in sent if "generate" in each]) == 3
