"""`Checks` validates the requests that a keeper is about to store, as if they were to be generated.

The answer has what the tokenizer would choose for the request (its seed, its class, the model's defaults), so
that the keeper stores it: sent again, it is the same request. Checks run on a thread; without a keeper there
are none.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.tokenizer.prepare import ServedModel, Submission, prepared
from shared.actor.mailbox import Mailbox
from shared.errors import BadRequest, HeadraceError, Overloaded
from shared.messages import Tokenized
from shared.nats import access, subjects
from shared.nats.interface import Delivery, Subscription
from shared.replies import error_reply, to_json

MAX_CHECKS = 1_024  # at a time


class Checks:
    """Answers `check` for one tokenizer."""

    def __init__(
        self, mailbox: Mailbox, model: ServedModel, classes: Callable[[str], tuple[str, ...]]
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
        if not access.answerable(self._mailbox.bus, delivery):
            return
        if len(self._running) >= MAX_CHECKS:
            busy = Overloaded("this tokenizer validates too many requests: try again", retry_after_ms=1_000)
            self._mailbox.bus.publish(delivery.reply, error_reply(busy, "", ""))
            return
        task = asyncio.get_running_loop().create_task(self._check(delivery))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _check(self, delivery: Delivery) -> None:
        tenant = subjects.name_at(delivery.subject, 3)
        submission = Submission(
            tenant=tenant,
            inbox=access.reply_inbox(access.user_of("keeper"), subjects.token(tenant), delivery.reply),
            body=delivery.data,
            fresh_id="",
            fresh_seed=secrets.randbits(64),
            received_wall_us=self._mailbox.clock.wall_us(),
            classes=self._classes(tenant),
        )
        loop = asyncio.get_running_loop()
        outcome = (await loop.run_in_executor(self._thread, prepared, submission, self._model)).outcome
        if isinstance(outcome, Tokenized) and outcome.pooling:
            outcome = BadRequest("`input`: vectors are not kept for later; do not submit it", param="input")
        if isinstance(outcome, HeadraceError):
            body = error_reply(outcome, "", "")
        else:
            chosen = {name: getattr(outcome.sampling, name) for name in self._model.defaults.fields}
            body = to_json({"seed": outcome.seed, "slo_class": outcome.slo_class, **chosen})
        self._mailbox.bus.publish(delivery.reply, body)
