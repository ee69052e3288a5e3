"""`AdapterNames` adds the adapters of a nats-server: names that are an adapter of one model each.

An adapter is an alias of its model (shared/aliases.py) with the weights that are added: so its
requests find a tokenizer of the model as those of an alias do, and all holders know it. An executor reads the
folder before, and refuses what it cannot compute. Requests have the weights that the name means when a
tokenizer of the model prepares them, and keep them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from shared import bodies
from shared.actor.mailbox import Mailbox
from shared.aliases import MAX_ALIASES, AdapterFiles, Alias, Aliases
from shared.client.client import error_of
from shared.errors import BadRequest, Overloaded, Unavailable, UnknownModel
from shared.nats import access, subjects
from shared.nats.interface import Delivery, NoResponders, RequestTimeout, Subscription
from shared.replies import change_reply

log = logging.getLogger("headrace.tokenizer")

CHECK_US = 60_000_000  # an executor reads a folder of some GB
PARAM, PATH = "lora_name", "lora_path"


class AdapterNames:
    """The operator's changes, for one tokenizer."""

    def __init__(
        self,
        mailbox: Mailbox,
        table: Aliases,
        publish: Callable[[Alias], Coroutine[Any, Any, bool]],
        roots: Callable[[], Mapping[str, str]],
        is_model: Callable[[str], bool],
    ) -> None:
        """`publish` sends a change to all holders, and returns whether it is stored. `roots`: the models of
        this server by all of their names; `is_model`: whether a model has a name, or had it a moment ago."""
        self._mailbox, self._table, self._publish = mailbox, table, publish
        self._roots, self._is_model = roots, is_model
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> list[Subscription]:
        """Serve the operator: one tokenizer makes each change."""
        return [await self._mailbox.bus.subscribe(subjects.ADAPTER_ALL, self._on_set, queue="adapters")]

    async def drain(self) -> None:
        """Return when no change is on its way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _on_set(self, delivery: Delivery) -> None:
        if access.can_answer(self._mailbox.bus, delivery):
            task = asyncio.get_running_loop().create_task(self._answer(delivery))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: Delivery) -> None:
        reply = await change_reply(self._asked(asked), asked.subject, log)
        self._mailbox.bus.publish(asked.reply, reply)

    async def _asked(self, asked: Delivery) -> dict[str, Any]:
        name = subjects.name_at(asked.subject, 3)
        body = bodies.asked(bodies.AdapterSet, asked.data)
        async with self._changing:
            return await (self._add(name, body) if body else self._remove(name))

    async def _add(self, name: str, asked: bodies.AdapterSet) -> dict[str, Any]:
        """Add an adapter under a name, or put another one in its place. Raises BadRequest, UnknownModel,
        Overloaded, Unavailable."""
        known, path = self._table.get(name), asked.get("path", "")
        if not path:
            raise BadRequest("the path of a folder is missing", param=PATH)
        if self._is_model(name) or (known is not None and known.adapter is None):
            raise BadRequest(f"{name!r:.80} is a model or an alias: choose another name", param=PARAM)
        if known is not None and not asked.get("replace"):
            raise BadRequest(
                f"the adapter {name!r:.80} has been loaded already: remove it first, or replace it",
                param=PARAM,
            )
        if not self._table.has_room(name):
            full = f"there are {MAX_ALIASES} aliases and adapters, with those that were deleted"
            raise Overloaded(f"{full}: use one of their names")
        model = self._model_of(name, asked)
        facts = await self._check(model, path)
        if self._table.get(name) != known:
            raise Unavailable(f"{name!r:.80} was changed while an executor read the adapter: try again")
        files = AdapterFiles(
            digest=facts["digest"], path=path, rank=facts["rank"], bytes=facts["bytes"],
            tenant=asked.get("tenant", ""),
        )  # fmt: skip
        change = self._table.next(name, ((model, 1),), self._mailbox.clock.wall_us(), files)
        return await self._change(change, known)

    def _model_of(self, name: str, asked: bodies.AdapterSet) -> str:
        """The model of a new adapter: the one that was asked for, or the only one."""
        roots = self._roots()
        models = sorted({*roots.values()})
        if (model := asked.get("model", "")) and model not in roots:
            raise UnknownModel(f"no service serves model {model!r:.80}: name one of {models}", param="model")
        if not model and len(models) > 1:
            raise BadRequest(f"name the model of the adapter, one of {models!s:.200}", param="model")
        found = roots[model] if model else models[0]
        base, colon, _ = name.partition(":")
        if colon and base in roots and roots[base] != found:
            raise BadRequest(
                f"{name!r:.80} begins with the name of another model than {found!r}", param=PARAM
            )
        return found

    async def _check(self, model: str, path: str) -> bodies.AdapterFacts:
        subject = subjects.adapter_check(model)
        body = bodies.encode(bodies.AdapterNamed(path=path))
        try:
            reply = await self._mailbox.bus.request(subject, body, timeout_us=CHECK_US)
        except NoResponders:
            raise BadRequest(
                f"no executor of {model!r:.80} has places for adapters: start them with --lora-places",
                param="model",
            ) from None
        except RequestTimeout:
            raise Unavailable("no executor has read the adapter in time: try again") from None
        facts = bodies.decode(bodies.AdapterFacts, reply.data)
        if "error" in facts:
            raise error_of(facts)
        return facts

    async def _remove(self, name: str) -> dict[str, Any]:
        """Requests that arrive from now on find no such name; those that run go on. Raises UnknownModel."""
        known = self._table.get(name)
        if known is None or known.adapter is None:
            raise UnknownModel(f"there is no adapter {name!r:.80}: see `headrace adapter list`", param=PARAM)
        change = self._table.next(name, (), self._mailbox.clock.wall_us(), known.adapter)
        return await self._change(change, known)

    async def _change(self, change: Alias, before: Alias | None) -> dict[str, Any]:
        stored = await self._publish(change)
        self._table.apply(change)
        after = shown(change) if change.targets else None
        return {"before": shown(before) if before is not None else None, "after": after, "stored": stored}


def shown(alias: Alias) -> dict[str, Any]:
    """An adapter for people: its model, digest, rank, size and folder."""
    files = alias.adapter
    assert files is not None, "it is an adapter"
    return {
        "model": alias.main, "digest": files.digest, "rank": files.rank, "bytes": files.bytes,
        "path": files.path, **({"tenant": files.tenant} if files.tenant else {}),
    }  # fmt: skip
