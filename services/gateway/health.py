"""`Health` decides whether a request would succeed now: all kinds are ready, and a probe was answered.

    a kind is missing ──▶ all are ready ──probe──▶ proven ──a kind goes, or a request gets 503──▶ …

Each model has its own state; one proven model makes the gateway healthy. A probe requests the start of an
answer; it is repeated with the heartbeats until it succeeds.
"""

from __future__ import annotations

import asyncio

from shared.actor.membership import Peers, missing
from shared.client import Client, probe
from shared.errors import HeadraceError


class Health:
    """The state of `/health` and `/ready`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._why = "starting"
        self._proven: set[str] = set()  # models
        self._last = ""  # model that was probed
        self._probing: asyncio.Task[None] | None = None
        self.draining = False
        self.online = True

    @property
    def unready(self) -> str:
        """Why this gateway should get no requests, apart from the services; empty: it is ready."""
        if self.draining:
            return "draining"
        return "" if self.online else "no connection to the nats-server"

    @property
    def why(self) -> str:
        """Why a request would fail; empty: it would succeed."""
        return self.unready or self._why

    def check(self, peers: Peers) -> None:
        """Update the state. Call when the living services change, and at each heartbeat."""
        if self.draining:
            return
        if self._probing is not None and self._probing.done():
            self._probing.result()  # raises an unexpected error
        models = peers.models("tokenizer")
        lacking = {model: missing(peers, model) for model in models}
        whole = [model for model in models if not lacking[model]]
        self._proven &= set(whole)
        if not whole:
            gone = min(lacking.values(), key=len, default=missing(peers))
            self._why = f"waiting for: {', '.join(gone)}"
            return
        if self._proven:
            self._why = ""
        unproven = [model for model in whole if model not in self._proven]
        if unproven and self._probing is None:  # probe the models in turn
            self._last = min(unproven, key=lambda model: (model <= self._last, model))
            self._probing = asyncio.get_running_loop().create_task(self._probe(self._last, peers))

    def doubt(self, why: str, model: str = "") -> None:
        """A request (to a model) failed: the model, or all, must be proven again."""
        self._proven -= {model} if model else set(self._proven)
        if not self._proven:
            self._why = why

    def stop(self) -> None:
        """Send no more probes."""
        self.draining = True
        if self._probing is not None:
            self._probing.cancel()

    async def _probe(self, model: str, peers: Peers) -> None:
        try:
            await probe(self._client, model)
        except HeadraceError as error:
            self._probing = None
            self.doubt(f"a request to {model} failed: {error.message}", model)
        else:
            self._proven.add(model)
            self._probing = None
            self.check(peers)
