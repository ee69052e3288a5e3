"""`Queries` answers requests that need no scheduler: the list of models, tokenize, and unknown models.

The actor subscribes it in `start`. `refuse` sends the error of a request that ends at the tokenizer, and its
spans. The public subjects are common to all fleets on a nats-server: before a 404 it asks the server whether
any process serves the model.

`Checks` validates the requests that a keeper is about to store, as if they were to be generated.

The answer has what the tokenizer would choose for the request (its seed, its class, the model's defaults), so
that the keeper stores it: sent again, it is the same request. Checks run on a thread; without a keeper there
are none.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from services.tokenizer import prepare
from services.tokenizer.core import WAIT_US, Fail
from shared import bodies, codec, errors
from shared.actor.mailbox import Mailbox
from shared.actor.membership import Peers
from shared.aliases import Alias, Aliases
from shared.api import EmbeddingRequest
from shared.fair_share import has_no_room
from shared.messages import Heartbeat, Tokenized
from shared.nats import access, subjects
from shared.nats.interface import Bus, Delivery, NoResponders, RequestTimeout, Subscription
from shared.replies import end_headers, error_reply, to_json
from shared.telemetry import traces
from shared.telemetry.traces import COMPONENT, RequestFacts, SpanData, received, root_attributes, root_name

log = logging.getLogger("headrace.tokenizer")

MAX_QUESTION_BYTES = 65_536  # answered on the event loop within 0.2 s; longer ones on a thread
MAX_QUESTIONS_BYTES = 16 * 1024 * 1024  # of long questions that wait: some five seconds
MAX_LOOKING = 256  # unknown models at a time
MAX_KNOWN = 1_024  # models of all fleets on a server
MAX_UNSURE = 8_192  # requests for one unknown model
LISTEN_US = 1_000_000
LOOK_EVERY_S = 0.01
FORGET_US = 60_000_000  # from the last heartbeat for a model: until then its requests are 503, later 404
RETRY_AFTER_MS = 1_000
GONE = "gone"  # the state of an alias's target without a tokenizer


class Queries:
    """Answers requests that need no scheduler."""

    def __init__(
        self,
        mailbox: Mailbox,
        model: prepare.ServedModel,
        context: Callable[[], int],
        second: Bus,
        table: Aliases,
        parts: Sequence[Any],
        *,
        edge: bool = False,
    ) -> None:
        """`context` of this fleet, tokens; `second`: connection for the requests for any model. `parts` may
        forward a request to a name that no model has. `edge`: the centre answers for all other models, and
        may serve others under the names of this one."""
        self._mailbox = mailbox
        self._second = second
        self._model = model
        self._context = context
        self._edge = edge
        self._table, self._parts = table, parts
        self._fleets: dict[str, Peers] = {}  # tokenizers of every fleet on this server
        self._known: dict[str, int] = {}  # last heartbeat of a tokenizer, by model
        self._unsure: dict[str, list[tuple[Delivery, str]]] = {}  # requests by model, with their tenants
        self._looking: set[asyncio.Task[None]] = set()
        self._awaited, self._awaited_until_us = set[str](), mailbox.clock.now_us() + WAIT_US
        self._any_model: list[Subscription] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long-questions")
        self._long_bytes: Counter[str] = Counter()  # of long questions without an answer, by tenant
        self._answering: set[asyncio.Task[None]] = set()
        self._opening: asyncio.Task[None] | None = None

    async def listen(self, awaited: Sequence[str] = ()) -> list[Subscription]:
        """Subscribe, as queue groups: one tokenizer answers each request. `awaited`: the models of this
        fleet. While one has no tokenizer, up to WAIT_US after a start, requests for unknown models have no
        receiver, and gateways send them again."""
        self._awaited = {*awaited} - {self._model.name}
        subscribe = self._mailbox.bus.subscribe
        heartbeats = await subscribe(subjects.TOKENIZER_HEARTBEATS_ALL_FLEETS, self._on_beat)
        self._mailbox.bus.publish(subjects.HEARTBEAT_REQUEST_ALL_FLEETS, b"")
        if not (self._edge or self._awaited):
            await self._open()
        return [
            heartbeats,
            await subscribe(subjects.MODELS, self._on_models, queue="models"),
            await subscribe(subjects.MODELS_ANY_TENANT, self._on_models, queue="models"),
            *[
                await subscribe(
                    subjects.tokenize_any_tenant(name), partial(self._on_tokenize, name), queue="tokenizer"
                )
                for name in self._model.names
            ],
        ]

    async def _open(self) -> None:
        asked = await self._second.subscribe(subjects.GENERATE_ALL, self._on_any_model, queue="unknown-model")
        self._any_model.append(asked)

    async def check_names(self) -> None:
        """Raises SetupError if another model on this server has one of the names of this one."""
        if self._edge:
            return
        try:
            found = await self._mailbox.bus.request(subjects.MODELS, b"", timeout_us=LISTEN_US)
        except (NoResponders, RequestTimeout):
            return
        for entry in bodies.decode(bodies.Models, found.data)["data"]:
            name, root = entry["id"], entry.get("root", entry["id"])
            if name in self._model.names and root != self._model.name:
                other = f"of model {root!r}" if name != root else "of another model"
                raise errors.SetupError(f"{name!r} is a name {other} on this server: change model_name")

    async def drain(self) -> None:
        """Return when no request waits in `_look`."""
        if self._opening is not None:
            await self._opening
        for subscription in self._any_model:
            await subscription.drain()
        if tasks := self._looking | self._answering:
            await asyncio.wait(tasks)
        self._thread.shutdown(wait=False)

    def _on_models(self, delivery: Delivery) -> None:
        if access.can_answer(self._mailbox.bus, delivery):
            names = delivery.subject.split(".")  # of a tenant, or of none
            tenant = subjects.untoken(names[3]) if len(names) > 3 else ""
            self._mailbox.bus.publish(delivery.reply, to_json(self._models_body(tenant)))

    def _on_tokenize(self, name: str, delivery: Delivery) -> None:
        if not access.can_answer(self._mailbox.bus, delivery):
            return
        now_us, size = self._mailbox.clock.wall_us(), len(delivery.data)
        if size <= MAX_QUESTION_BYTES:
            self._answer(delivery, name, _tokenized(delivery.data, self._model, now_us))
            return
        names = subjects.names_in(delivery.subject)
        tenant, held = "" if names is None else names[0], self._long_bytes
        if has_no_room(held[tenant], size, held.total(), MAX_QUESTIONS_BYTES, len(held)):
            why = f"{held[tenant]} bytes of your long prompts wait to be counted: try again later"
            self._fail(delivery, errors.Overloaded(why, retry_after_ms=RETRY_AFTER_MS))
            return
        held[tenant] += size
        task = asyncio.get_running_loop().create_task(self._answer_long(delivery, name, tenant, now_us))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_long(self, delivery: Delivery, name: str, tenant: str, now_us: int) -> None:
        run = asyncio.get_running_loop().run_in_executor
        try:
            found = await run(self._thread, _tokenized, delivery.data, self._model, now_us)
        finally:
            self._long_bytes[tenant] -= len(delivery.data)
            self._long_bytes += Counter()  # drops the zeros
        self._answer(delivery, name, found)

    def _answer(self, delivery: Delivery, name: str, found: dict[str, Any] | errors.HeadraceError) -> None:
        try:
            if isinstance(found, errors.HeadraceError):
                raise found
            self._mailbox.bus.publish(delivery.reply, to_json({**found, "model": name}))
        except errors.HeadraceError as error:  # PayloadTooLarge, too: the ids of a long prompt
            self._fail(delivery, error)
        except Exception as error:  # a bug is a 500 for this client, never silence
            log.exception("a question for tokens failed")
            self._fail(
                delivery, errors.EngineError(f"the tokenizer failed on this request: {type(error).__name__}")
            )

    def _on_any_model(self, delivery: Delivery) -> None:
        names = subjects.names_in(delivery.subject)
        if not access.can_answer(self._mailbox.bus, delivery):
            return
        if names is None:
            param, why = subjects.wrong_name(delivery.subject, "model")
            self._fail(delivery, errors.BadRequest(why, param=param))
            return
        tenant, model = names
        if model in self._model.names:
            return
        try:
            if self._is_forwarded(delivery, tenant, model):
                return
        except errors.PayloadTooLarge as error:  # with the header of an alias
            self._fail(delivery, error)
            return
        if (waiting := self._unsure.get(model)) is not None and len(waiting) < MAX_UNSURE:
            waiting.append((delivery, tenant))
        elif waiting is not None or len(self._unsure) >= MAX_LOOKING:  # a flood
            if model not in self.served():
                self._refuse(delivery, tenant, model)
        else:
            self._unsure[model] = [(delivery, tenant)]
            task = asyncio.get_running_loop().create_task(self._look(model))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    async def _look(self, model: str) -> None:
        """Refuse the requests for a model if no process subscribes to it. Only the server has this state: the
        heartbeats lag when a tokenizer has just started or died. One check covers the requests received
        before it, not later ones: the tokenizer may die in between."""
        try:
            while asked := self._unsure[model]:
                self._unsure[model] = []
                if await self._has_listener(subjects.tokenize(asked[0][1], model)):
                    await asyncio.sleep(LOOK_EVERY_S)
                    if not self._table.is_settled(model, self._mailbox.clock.now_us()):
                        self._unsure[model] += asked  # another tokenizer may not have ended this alias yet
                    continue
                for part in self._parts:
                    await part.load()  # JetStream may have been away at the start
                for delivery, tenant in asked:
                    if not self._is_forwarded(delivery, tenant, model):
                        self._refuse(delivery, tenant, model)
        finally:
            del self._unsure[model]

    def _is_forwarded(self, delivery: Delivery, tenant: str, model: str) -> bool:
        return any(part.forward(delivery, tenant, model) for part in self._parts)

    async def _has_listener(self, question: str) -> bool:
        """True if a process, busy or not, subscribes to the subject `question`."""
        try:
            await self._mailbox.bus.request(question, b"", timeout_us=LISTEN_US)
        except NoResponders:
            return False
        except RequestTimeout:
            return True
        return True

    def _refuse(self, delivery: Delivery, tenant: str, model: str) -> None:
        served = [*self.served(), *(alias.name for alias in self._table.all())]
        error: errors.HeadraceError
        clock = self._mailbox.clock
        if self.is_served(model) or model in self._awaited:
            error = errors.Unavailable(
                f"no service answers for model {model!r}; see `headrace status`, or try again",
                retry_after_ms=RETRY_AFTER_MS,
            )
        else:
            names = ", ".join(sorted(served))
            error = errors.UnknownModel(
                f"no service serves model {model!r}; ask for one of: {names}", param="model"
            )
        tracer, trace = self._mailbox.tracer, traces.from_headers(delivery.headers)
        trace, parent_span = (trace, "") if tracer is None else tracer.begin(trace)
        now_us = clock.wall_us()
        origin = prepare.Origin(tenant, now_us, now_us, parent_span)
        refuse(self._mailbox, model, Fail(delivery.reply, "", error, trace, origin))

    def is_served(self, model: str) -> bool:
        """True if a tokenizer has reported this name within FORGET_US."""
        return self._mailbox.clock.now_us() - self._known.get(model, -FORGET_US) < FORGET_US

    def newest(self, figure: str) -> int:
        """The largest `figure` that a ready tokenizer on this server reports."""
        return max((peers.max_load("tokenizer", figure, "") for peers in self._fleets.values()), default=0)

    def _fail(self, delivery: Delivery, error: errors.HeadraceError) -> None:
        trace = traces.from_headers(delivery.headers)
        body = error_reply(error, "", trace)
        self._mailbox.bus.publish(delivery.reply, body, headers=end_headers(error, trace))

    def _on_beat(self, delivery: Delivery) -> None:
        try:
            envelope = codec.decode(delivery.data)
        except errors.WireError:
            return  # from a fleet with another version
        if isinstance(envelope.message, Heartbeat):
            peers = self._fleets.setdefault(delivery.subject.split(".")[1], Peers())
            heartbeat, now_us = envelope.message, self._mailbox.clock.now_us()
            peers.update(envelope.epoch, heartbeat, now_us)
            for name in (heartbeat.model, *heartbeat.aliases):
                if name in self._known or (name and len(self._known) < MAX_KNOWN):
                    self._known[name] = now_us
            late = now_us >= self._awaited_until_us
            waits = self._awaited and self._opening is None and not self._edge
            if waits and (late or self._awaited <= {*self.served()}):
                self._opening = asyncio.get_running_loop().create_task(self._open())

    def are_all_ours(self, ids: Sequence[str]) -> bool:
        """True if all tokenizers of this model, in any fleet on this server, are `ids` of this fleet."""
        ready: list[tuple[str, str]] = []
        for fleet, peers in self._fleets.items():
            peers.expire(self._mailbox.clock.now_us())
            ready += [(fleet, actor) for actor in peers.ready("tokenizer", self._model.name)]
        ours = subjects.token(self._mailbox.fleet)
        return all(fleet == ours and actor in ids for fleet, actor in ready)

    def served(self) -> dict[str, int]:
        """The context (tokens) of each model with a ready tokenizer in any fleet on this server, by all of
        its names."""
        contexts = {self._model.name: self._context()}
        for peers in self._fleets.values():
            peers.expire(self._mailbox.clock.now_us())
            for name in peers.models("tokenizer"):
                contexts[name] = max(contexts.get(name, 0), peers.max_load("tokenizer", "context", name))
        aliases = {alias: contexts[root] for alias, root in self._roots().items() if root in contexts}
        return aliases | contexts

    def roots(self) -> dict[str, str]:
        """The models of this server by all of their names."""
        roots = self._roots()
        return {name: roots.get(name, name) for name in self.served()}

    def _models_body(self, tenant: str) -> dict[str, Any]:
        contexts, roots, peers = self.served(), self._roots(), self._mailbox.peers
        aliases = [alias for alias in self._table.all() if alias.name not in contexts]
        if tenant:  # without one, all adapters
            owners = ("", tenant)
            aliases = [each for each in aliases if each.adapter is None or each.adapter.tenant in owners]
        body = models_body(contexts, roots, aliases)
        ours = {name: peers.model_state(name) for name in peers.models("tokenizer")}
        for entry in body["data"]:
            for each, name in ((entry, entry["root"]), *((t, t["model"]) for t in entry.get("targets", ()))):
                if (state := ours.get(name)) is not None:  # of this fleet
                    each["state"] = state
        return body

    def _roots(self) -> dict[str, str]:
        """The models of this server by their further names."""
        roots = dict.fromkeys(self._model.aliases, self._model.name)
        for peers in self._fleets.values():
            roots |= peers.aliases()
        return roots


def models_body(
    contexts: Mapping[str, int], roots: Mapping[str, str], aliases: Sequence[Alias] = ()
) -> dict[str, Any]:
    """OpenAI's list of models, with two fields of vLLM's: `max_model_len`, tokens of a prompt and its answer,
    and `root`, the model's own name. An alias has `targets`, its `root` is the one with the highest weight,
    and its requests fit into each of them. A target without a service is GONE: the others take its part. An
    adapter has its model as `root` and as vLLM's `parent`."""
    about = {"object": "model", "created": 0, "owned_by": "headrace"}
    entries = [
        {"id": name, **about, "root": roots.get(name, name), "max_model_len": contexts[name]}
        for name in contexts
    ]
    for alias in aliases:
        targets = [
            {"model": model, "weight": weight, **({} if model in contexts else {"state": GONE})}
            for model, weight in alias.targets
        ]
        there = alias.among(lambda model: model in contexts)
        context = min(contexts.get(model, 0) for model, _ in there.targets)
        entry = {"id": alias.name, **about, "root": there.main, "max_model_len": context}
        if (files := alias.adapter) is not None:  # `parent`, as vLLM names the model of an adapter
            adapter = {"digest": files.digest, "rank": files.rank, "bytes": files.bytes}
            entries.append({**entry, "parent": there.main, "adapter": adapter})
            continue
        entries.append({**entry, "targets": targets})
    return {"object": "list", "data": sorted(entries, key=lambda entry: str(entry["id"]))}


def tokenize_body(data: bytes, model: prepare.ServedModel, wall_us: int) -> dict[str, Any]:
    """Token ids of the `prompt`, `messages` or `input` in `data`, the same as for a generate request. Raises
    BadRequest."""
    request = prepare.read_request(prepare.read_body(data))
    if isinstance(request, EmbeddingRequest):
        ids = prepare.encode_input(request, model)
    else:
        if (output := prepare.answer_form_of(request)) is not None:
            output.grammar(None, thinking=False, available=True)  # raises for a wrong one
        ids = prepare.encode_prompt(request, output, model, wall_us)
    return {"model": model.name, "count": len(ids), "tokens": ids}


def _tokenized(
    data: bytes, model: prepare.ServedModel, wall_us: int
) -> dict[str, Any] | errors.HeadraceError:
    """The answer of `tokenize_body`, or its error."""
    try:
        return tokenize_body(data, model, wall_us)
    except RecursionError:
        return errors.BadRequest("the body is nested too deeply; send flat messages")
    except errors.HeadraceError as error:
        return error
    except Exception as error:  # a bug is a 500 for this client, never silence
        log.exception("a question for tokens failed")
        return errors.EngineError(f"the tokenizer failed on this request: {type(error).__name__}")


def refuse(mailbox: Mailbox, model: str, fail: Fail) -> None:
    """Send the error to the client, and export the request's spans if it is sampled."""
    headers = end_headers(fail.error, fail.trace)
    mailbox.bus.publish(fail.inbox, error_reply(fail.error, fail.request, fail.trace), headers=headers)
    if mailbox.tracer is not None and fail.origin.parent_span and traces.is_sampled(fail.trace):
        spans = refusal_spans(fail, model, mailbox.clock.wall_us(), mailbox.source)
        mailbox.tracer.export(fail.trace, fail.origin.parent_span, spans)


def refusal_spans(fail: Fail, model: str, now_us: int, component: str) -> list[SpanData]:
    """The spans of a refused request: its wait in the mailbox, then its tokenization or its wait for a
    scheduler."""
    origin = fail.origin
    facts = RequestFacts(
        request=fail.request,
        tenant=origin.tenant,
        model=model,
        format="chat",  # unknown for a request that cannot be read
        inbox=fail.inbox,
        received_wall_us=origin.received_wall_us,
        detokenizer=component,
        error=fail.error,
    )
    start = origin.received_wall_us
    handled = max(origin.handled_wall_us, start)
    end = max(now_us, handled)
    name = "waiting for a scheduler" if origin.tokenized else "tokenize"
    text = fail.error.message
    return [
        SpanData(root_name(facts), start, end, None, root_attributes(facts), kind="server", error=text),
        received(facts, start, handled),
        SpanData(name, handled, end, attributes={COMPONENT: component}),
    ]


MAX_CHECKS = 1_024  # at a time


class Checks:
    """Answers `check` for one tokenizer."""

    def __init__(
        self, mailbox: Mailbox, model: prepare.ServedModel, classes: Callable[[str], tuple[str, ...]]
    ) -> None:
        """`classes`: the service classes that a tenant may use."""
        self._mailbox, self._model, self._classes = mailbox, model, classes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checks")
        self._running: set[asyncio.Task[None]] = set()

    async def listen(self) -> list[Subscription]:
        """Subscribe, as a queue group: one tokenizer answers each request."""
        subscribe, checked = self._mailbox.bus.subscribe, map(subjects.check_any_tenant, self._model.names)
        return [await subscribe(subject, self._on_check, queue="tokenizer") for subject in checked]

    async def drain(self) -> None:
        """Return when no check runs."""
        if self._running:
            await asyncio.wait(self._running)
        self._thread.shutdown(wait=False)

    def _on_check(self, delivery: Delivery) -> None:
        if not access.can_answer(self._mailbox.bus, delivery):
            return
        if len(self._running) >= MAX_CHECKS:
            busy = errors.Overloaded(
                "this tokenizer validates too many requests: try again", retry_after_ms=1_000
            )
            self._mailbox.bus.publish(delivery.reply, error_reply(busy, "", ""))
            return
        task = asyncio.get_running_loop().create_task(self._check(delivery))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _check(self, delivery: Delivery) -> None:
        tenant = subjects.name_at(delivery.subject, 3)
        submission = prepare.Submission(
            tenant=tenant,
            inbox=access.reply_inbox(access.user_of("keeper"), subjects.token(tenant), delivery.reply),
            body=delivery.data,
            fresh_id="",
            fresh_seed=secrets.randbits(64),
            received_wall_us=self._mailbox.clock.wall_us(),
            classes=self._classes(tenant),
        )
        loop = asyncio.get_running_loop()
        outcome = (
            await loop.run_in_executor(self._thread, prepare.prepared, submission, self._model)
        ).outcome
        if isinstance(outcome, Tokenized) and outcome.pooling:
            outcome = errors.BadRequest(
                "`input`: vectors are not kept for later; do not submit it", param="input"
            )
        if isinstance(outcome, errors.HeadraceError):
            body = error_reply(outcome, "", "")
        else:
            chosen = {name: getattr(outcome.sampling, name) for name in self._model.defaults.fields}
            body = to_json({"seed": outcome.seed, "slo_class": outcome.slo_class, **chosen})
        self._mailbox.bus.publish(delivery.reply, body)
