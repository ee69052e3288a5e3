"""Aliases of two models in one fleet: the operator sets them while requests run, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import KINDS, Connect, Pipeline
from support.pipeline.gateway_side import add_gateway, healthy, remove_gateway

from services.keeper.actor import KeeperActor
from services.launcher import nats_server as servers
from services.launcher.commands import model as command
from services.launcher.nats_server import NatsServer, ServerLimits
from services.launcher.session import Target
from services.tokenizer import actor as tokenizer
from services.tokenizer import aliases, queries
from services.tokenizer.actor import TokenizerActor
from shared.actor.runtime import Actor, Runtime
from shared.aliases import AdapterFiles, Alias
from shared.client.client import error_of
from shared.clock import SystemClock
from shared.config import load
from shared.errors import BadRequest, HeadraceError, SetupError, Unavailable, UnknownModel
from shared.nats import subjects
from shared.nats.bus import NatsBus
from shared.nats.jetstream import JetStream

ASKED: dict[str, Any] = {"prompt": "The sea", "max_tokens": 2, "ignore_eos": True}
LONG = {**ASKED, "max_tokens": 400}


class Two(Pipeline):
    """One fleet with the models `big` and `new`."""

    heartbeat_us = 500_000  # two models in one event loop: none is to be declared dead

    def build(self, kind: str) -> Actor:
        return KeeperActor() if kind == "keeper" else super().build(kind)

    async def begin(self) -> None:
        await super().begin()
        self.settings = load(
            flags={"fleet": self.settings.fleet, "backend": "sim", "sim": "step=200", "l1": "off"}
            | {"model_name": "new"}
        ).settings
        for kind in (kind for kind in KINDS if kind != "kv_offload"):
            await self.add(kind, f"{kind}-2")
        await self.until(lambda: bool(self.runtimes["scheduler-2"].actor.status()["executors"]))
        await self.until(lambda: all(len(each._queries.served()) == 2 for each in self.tokenizers()))

    def tokenizers(self) -> list[TokenizerActor]:
        return [each.actor for each in self.runtimes.values() if isinstance(each.actor, TokenizerActor)]

    async def set(self, name: str, **targets: int) -> dict[str, Any]:
        data = json.dumps(targets).encode()
        answer = await self.client.bus.request(subjects.set_alias(name), data, timeout_us=10_000_000)
        found: dict[str, Any] = json.loads(answer.data)
        if "error" in found:
            raise error_of(found)
        return found

    async def model_of(self, name: str, request: str, asked: dict[str, Any] = ASKED) -> str:
        body = {**asked, "model": name, "request_id": request}
        return str((await self.client.complete(body, timeout_s=60))["model"])

    async def models_of(self, name: str, count: int, prefix: str = "r", **more: Any) -> list[str]:
        asked = (self.model_of(name, f"{prefix}{n}", {**ASKED, **more}) for n in range(count))
        return await asyncio.gather(*asked)

    def is_settled(self, name: str) -> bool:
        """All tokenizers have had an alias for so long that they take over its requests."""
        tokenizers = [each for each in self.runtimes.values() if isinstance(each.actor, TokenizerActor)]
        return all(each.actor._table.is_settled(name, each.clock.now_us()) for each in tokenizers)

    async def rest(self) -> None:
        await self.assert_idle()
        await self.stop()


@pytest.fixture
async def two(connect: Connect, fleet: str) -> AsyncIterator[Two]:
    running = await Two.start(connect, fleet, model_name="big")
    assert isinstance(running, Two)
    yield running
    for name in ("chat", "code"):
        try:
            await running.set(name)
        except UnknownModel:
            continue
    await running.rest()


@pytest.mark.parametrize("connect", ["nats"], indirect=True)
async def test_a_canary_over_nats_and_http(two: Two) -> None:
    url = await add_gateway(two)
    await healthy(two)
    assert await two.set("chat", big=80, new=20) == {
        "alias": "chat", "before": {}, "after": {"big": 80, "new": 20}, "stored": False,
    }  # fmt: skip
    alias = Alias("chat", 0, (("big", 80), ("new", 20)))
    wanted = [alias.model_for("public", f"r{n}") for n in range(200)]
    assert Counter(wanted).keys() == {"big", "new"}
    assert await two.models_of("chat", 200) == wanted
    assert await two.models_of("chat", 200) == wanted  # each resend stays
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for n in (wanted.index("big"), wanted.index("new")):
            asked = {**ASKED, "model": "chat", "request_id": f"r{n}"}
            assert (await http.post("/v1/completions", json=asked)).json()["model"] == wanted[n]
            streamed = (await http.post("/v1/completions", json={**asked, "stream": True})).text
            assert f'"model":"{wanted[n]}"' in streamed
            both = {**asked, "prompt": ["a", "b", "c", "d", "e", "f"]}  # each with an id of its own
            answer = (await http.post("/v1/completions", json=both)).json()
            assert (answer["model"], len(answer["choices"])) == (wanted[n], 6)
        found = (await http.post("/tokenize", json={"model": "chat", "prompt": "The sea"})).json()
        assert found["model"] == "big"
        back = (await http.post("/detokenize", json={"model": "chat", "tokens": found["tokens"]})).json()
        assert back == {"model": "big", "prompt": "The sea"}
        listed = {entry["id"]: entry for entry in (await http.get("/v1/models")).json()["data"]}
        assert [*listed] == ["big", "chat", "new"]
        assert (listed["chat"]["root"], listed["chat"]["state"]) == ("big", "loaded")
        assert listed["chat"]["targets"] == [
            {"model": "big", "weight": 80, "state": "loaded"},
            {"model": "new", "weight": 20, "state": "loaded"},
        ]
        assert (await http.get("/v1/models/chat")).json() == listed["chat"]
        unknown = await http.post("/v1/completions", json={**ASKED, "model": "other"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "big, chat, new" in unknown.json()["error"]["message"]
    await remove_gateway(two)


@pytest.mark.parametrize("connect", ["nats"], indirect=True)
async def test_an_alias_changes_while_requests_run(two: Two) -> None:
    await two.set("chat", big=1)
    await two.until(lambda: two.is_settled("chat"))  # all tokenizers get copies of its requests
    assert {*await two.models_of("chat", 20, "early")} == {"big"}
    running = asyncio.ensure_future(two.models_of("chat", 16, "long", max_tokens=400))
    asked: list[asyncio.Future[list[str]]] = []
    await two.until(lambda: two.status("scheduler")["running"] > 0)
    for turn in range(9):  # between requests, and among them
        asked.append(asyncio.ensure_future(two.models_of("chat", 10, f"t{turn}-")))
        await two.set("chat", **({"big": 1}, {"new": 1}, {"big": 1, "new": 1})[turn % 3])
    found = [model for models in await asyncio.gather(running, *asked) for model in models]
    assert (len(found), {*found}) == (106, {"big", "new"})
    await two.set("chat", new=1)
    assert {*await two.models_of("chat", 20, "after")} == {"new"}
    assert {*await two.models_of("chat", 20, "early")} == {"big"}  # sent again, they stay
    assert (await two.set("chat"))["after"] == {}
    with pytest.raises(UnknownModel, match="no service serves model 'chat'"):
        await two.model_of("chat", "deleted")


@pytest.mark.parametrize("connect", ["memory"], indirect=True)
async def test_impossible_alias_is_refused(two: Two) -> None:
    await two.set("chat", big=1)
    with pytest.raises(BadRequest, match="'new' is a name of model 'new'"):
        await two.set("new", big=1)
    with pytest.raises(BadRequest, match="'chat' is an alias or an adapter: name the models"):
        await two.set("code", chat=1)
    with pytest.raises(BadRequest, match="'code' is an alias"):
        await two.set("code", code=1)
    with pytest.raises(UnknownModel, match="no service serves model 'none'; name one of: big, new"):
        await two.set("code", big=1, none=1)
    with pytest.raises(BadRequest, match="the weight of 'big' is 0"):
        await two.set("code", big=0)
    with pytest.raises(UnknownModel, match="there is no alias 'code'"):
        await two.set("code")
    with pytest.raises(BadRequest, match="the body asks for model 'new', its subject for 'big'"):
        await two.client.request(subjects.generate("public", "chat"), {**ASKED, "model": "new"})
    assert (await two.client.request(subjects.generate("public", "chat"), ASKED))["model"] == "big"
    settings = load(flags={"fleet": "beside", "model_name": "chat"}).settings
    runtime = Runtime(tokenizer.build(settings), await two.connect(), "beside", "tokenizer-9")
    with pytest.raises(SetupError, match="'chat' is a name of model 'big' on this server"):
        await runtime.start()


@pytest.mark.parametrize("connect", ["nats"], indirect=True)
async def test_the_others_take_the_part_of_a_model_that_has_gone(
    two: Two, nats_server: NatsServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "FORGET_US", 4 * two.heartbeat_us)
    url = await add_gateway(two)
    await healthy(two)
    await two.set("chat", big=50, new=50)
    assert {*await two.models_of("chat", 20)} == {"big", "new"}
    for name in [name for name in two.runtimes if name.endswith("-2")]:
        runtime = two.runtimes.pop(name)
        await runtime.finish(5)
    left = two.runtimes["tokenizer-1"].actor
    assert isinstance(left, TokenizerActor)
    await two.until(lambda: not left._queries.is_served("new"))
    assert {*await two.models_of("chat", 20)} == {"big"}, "resends, too"
    assert {*await two.models_of("chat", 20, prefix="s")} == {"big"}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for n in range(8):
            answer = await http.post(
                "/v1/completions", json={**ASKED, "model": "chat", "request_id": f"h{n}"}
            )
            assert answer.json()["model"] == "big"
    await command.list_models(Target(nats_server.url, "big"), as_json=False)
    line = "chat: alias of big=50 (loaded), new=50 (gone); the others take the part of new"
    assert line in capsys.readouterr().out.splitlines()
    await remove_gateway(two)


@pytest.mark.parametrize("connect", ["nats"], indirect=True)
async def test_operators_commands_change_the_weights(
    two: Two, nats_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target(nats_server.url, "big")
    await command.alias(target, "chat", ["big=95", "new=5"])
    await command.alias(target, "code", ["new"])
    assert capsys.readouterr().out == (
        "chat:\n  before none\n  after  big=95, new=5\n"
        "not stored, without JetStream: it ends with the last tokenizer\n"
        "code:\n  before none\n  after  new=1\n"
        "not stored, without JetStream: it ends with the last tokenizer\n"
    )
    await command.list_models(target, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    wanted = [
        "big: loaded",
        "chat: alias of big=95 (loaded), new=5 (loaded)",
        "code: alias of new=1 (loaded)",
        "new: loaded",
    ]
    assert [line for line in lines if line in wanted] == wanted
    await command.list_models(target, as_json=True)
    assert "targets" in json.loads(capsys.readouterr().out)["data"][1]
    for targets, delete, why in (
        ([], False, "or --delete"), (["big"], True, "or --delete"), (["big=x"], False, "MODEL=WEIGHT"),
        (["big=1", "big=2"], False, "twice"), (["=1"], False, "MODEL=WEIGHT"), (["big=0"], False, "is 0"),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=why):
            await command.alias(target, "chat", targets, delete=delete)
    await command.alias(target, "code", [], delete=True)
    assert "before new=1\n  after  none" in capsys.readouterr().out


async def test_a_lost_request_to_an_alias_is_taken_over_by_its_model() -> None:
    """The tokenizer that got it died before it forwarded it, or while it waited in its socket."""
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    two = await Two.start(connect, "lost", model_name="big")
    assert isinstance(two, Two)
    await two.set("chat", big=1, new=1)
    await two.until(lambda: two.is_settled("chat"))
    for model in ("big", "new"):
        broker.drop(f"headrace.v1.generate.public.{model}", 4)
    wanted = [Alias("chat", 0, (("big", 1), ("new", 1))).model_for("public", f"r{n}") for n in range(16)]
    assert min(Counter(wanted).values()) > 4
    assert await two.models_of("chat", 16) == wanted
    taken = [two.runtimes[f"tokenizer-{n}"].actor.status()["taken_over"] for n in (1, 2)]
    assert taken == [4, 4]
    await two.rest()


@pytest.mark.parametrize("connect", ["memory"], indirect=True)
async def test_a_request_to_an_alias_that_another_tokenizer_has_not_ended_yet_is_refused(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.set("chat", big=1)
    await two.until(lambda: two.is_settled("chat"))
    slow, ended = two.runtimes["tokenizer-2"].actor, asyncio.Event()
    assert isinstance(slow, TokenizerActor)
    subscribe = slow._aliases[0]._subscribe

    async def late(name: str) -> None:
        await ended.wait()
        await subscribe(name)

    monkeypatch.setattr(slow._aliases[0], "_subscribe", late)
    await two.set("chat")
    asked = [asyncio.ensure_future(two.model_of("chat", f"late{n}")) for n in range(8)]
    await two.until(lambda: any(each.actor._queries._looking for each in tokenizers(two)))
    ended.set()
    for each in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(each, UnknownModel), each


def tokenizers(two: Two) -> list[Any]:
    return [each for each in two.runtimes.values() if isinstance(each.actor, TokenizerActor)]


@pytest.mark.parametrize("connect", ["memory"], indirect=True)
async def test_a_tokenizer_that_joins_has_the_aliases_of_the_others(two: Two) -> None:
    await two.set("chat", big=1, new=2)
    for number in (1, 2):
        await two.add("tokenizer", f"tokenizer-{number + 2}")
        await two.runtimes.pop(f"tokenizer-{number}").finish(5)
        two.settings = load(
            flags={"fleet": two.settings.fleet, "backend": "sim", "model_name": "big", "l1": "off"}
        ).settings
    assert {*await two.models_of("chat", 40)} == {"big", "new"}
    assert (await two.set("chat", big=1))["before"] == {"big": 1, "new": 2}


@pytest.fixture
def durable() -> Any:
    server = servers.start(limits=replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="2GB"))
    yield server
    server.stop()


async def test_aliases_outlive_the_fleet_and_a_stored_request_keeps_its_model(durable: NatsServer) -> None:
    async def connect() -> Any:
        return await NatsBus.connect(durable.url, timeout_s=30)

    two = await Two.start(connect, "stored", model_name="big")
    assert isinstance(two, Two)
    await two.add("keeper", "keeper-1")
    assert (await two.set("chat", new=1))["stored"]
    assert (await two.set("code", big=1))["stored"]
    submit = subjects.submit("public", "chat")
    body = {**LONG, "model": "chat", "request_id": "d"}

    async def submitted() -> dict[str, Any]:
        while True:
            try:
                return await two.client.request(submit, body)
            except Unavailable:  # it has not made its streams, or has not got the alias
                await asyncio.sleep(0.05)

    assert (await submitted())["model"] == "new"
    assert (await two.set("chat", big=1))["stored"]
    assert (await two.client.request(submit, body))["model"] == "new"  # the same request, not another one
    with pytest.raises(HeadraceError, match="another request was submitted as d"):
        await two.client.request(submit, {**body, "max_tokens": 3})

    async def answered() -> dict[str, Any]:
        while True:
            state = await two.client.state("d")
            if state["status"] == "completed":
                return state
            await asyncio.sleep(0.05)

    state = await answered()
    assert (state["model"], state["answer"]["model"]) == ("new", "new")
    for name, targets in (("new", (("big", 1),)), ("big", ())):  # names that models have by now: these count
        files = None if targets else AdapterFiles("ab", "/a", 4, 8)
        two.client.bus.publish(subjects.alias(name), Alias(name, 1, targets, files).pack())
        await two.client.bus.flush()
        stored = await two.client.request(
            subjects.submit("public", name), {**ASKED, "model": name, "request_id": f"of-{name}"}
        )
        assert stored.get("model", name) == name
    await two.set("code")
    await two.set("new")
    await two.runtimes.pop("keeper-1").finish(5)
    await two.rest()

    again = await Two.start(connect, "stored", model_name="big")
    assert isinstance(again, Two)
    assert {*await again.models_of("chat", 5)} == {"big"}
    with pytest.raises(UnknownModel):
        await again.model_of("code", "gone")
    assert (await again.set("chat"))["before"] == {"big": 1}
    await again.rest()


async def test_the_aliases_of_a_removed_stream_are_stored_again(
    durable: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a restart, before the next change; with that change, all of them."""

    async def connect() -> Any:
        return await NatsBus.connect(durable.url, timeout_s=30)

    async def stored() -> set[str]:
        return {*await streams.subjects_like(subjects.ALIAS_STREAM, subjects.ALIAS_ALL)}

    async def remove() -> None:
        subject = f"$JS.API.STREAM.DELETE.{subjects.ALIAS_STREAM}"
        assert b'"success":true' in (await two.client.bus.request(subject, b"", timeout_us=5_000_000)).data

    monkeypatch.setattr(aliases, "STREAM_POLL_US", 100_000)
    two = await Two.start(connect, "removed", model_name="big")
    assert isinstance(two, Two)
    streams = JetStream(two.client.bus)
    await two.set("chat", new=1)
    await two.set("code", big=1)
    await two.set("code")
    both = {subjects.alias("chat"), subjects.alias("code")}
    assert await stored() == both, "a deleted one stays deleted"
    known = [each._aliases[0]._streams.made for each in two.tokenizers()]
    await two.until(lambda: all(made.was_found(subjects.ALIAS_STREAM) for made in known))
    await remove()
    async with asyncio.timeout(30):
        while True:
            with suppress(Unavailable):
                if await stored() == both:
                    break
            await asyncio.sleep(0.05)
    removed = [each for n in (1, 2) for each in two.runtimes[f"tokenizer-{n}"].actor.status()["removed"]]
    assert {*removed} == {subjects.ALIAS_STREAM}  # each tokenizer may find that it is gone
    monkeypatch.setattr(aliases, "STREAM_POLL_US", 3_600_000_000)
    await two.until(lambda: all(_looks_late(each) for each in two.runtimes.values()))
    await remove()
    await two.set("other", big=1)
    assert await stored() == {*both, subjects.alias("other")}
    await two.rest()


def _looks_late(runtime: Runtime) -> bool:
    actor = runtime.actor
    if not isinstance(actor, TokenizerActor):
        return True
    return (
        actor._aliases[0]._looks_at_us > runtime.clock.now_us() + 1_000_000_000
        and not actor._aliases[0]._tasks
    )


class SetClock(SystemClock):
    """A wall clock that was set."""

    ahead_us = 0

    def wall_us(self) -> int:
        return super().wall_us() + self.ahead_us


@pytest.mark.parametrize("connect", ["memory"], indirect=True)
@pytest.mark.parametrize("ahead_s", [2, -2, 600, -600, 172_800, -172_800])
async def test_a_change_of_an_alias_holds_also_with_a_slow_or_a_fast_clock(two: Two, ahead_s: int) -> None:
    """All tokenizers are gone meanwhile; a gateway still has what the first ones have set."""
    await add_gateway(two)
    await healthy(two)
    gateway: Any = next(each.actor for each in two.runtimes.values() if each.actor.kind == "gateway")
    for number in (1, 2):
        two.runtimes[f"tokenizer-{number}"].mailbox.clock = clock = SetClock()
        clock.ahead_us = ahead_s * 1_000_000
    await two.set("chat", big=1)
    await two.until(lambda: gateway._aliases.get("chat") is not None)
    for number in (1, 2):
        await two.runtimes.pop(f"tokenizer-{number}").finish(5)
    await two.add("tokenizer", "tokenizer-3")
    two.settings = load(flags={"fleet": two.settings.fleet, "model_name": "big", "l1": "off"}).settings
    await two.add("tokenizer", "tokenizer-4")
    assert (await two.set("chat", new=1))["before"] == {"big": 1}
    await two.until(lambda: gateway._aliases.get("chat").main == "new")
    assert await two.models_of("chat", 3) == ["new"] * 3
    await remove_gateway(two)
