"""Would a request succeed now? Every kind that it passes must be ready, and a real one have been answered.

    a kind is missing ──▶ all are there ──probe──▶ proven ──a kind goes, or a request met 503──▶ …

Each model goes this way by itself; one that is proven is enough. A probe is the beginning of an answer of one
model; it is repeated with the heartbeats until it is answered, then no more.
"""

from __future__ import annotations

import asyncio

from shared.actor.membership import Peers, missing
from shared.client import Client, probe
from shared.errors import HeadraceError


class Health:
    """What `/health` says."""

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
        """Why this gateway should get no requests, whoever serves them; empty: it should."""
        if self.draining:
            return "draining"
        return "" if self.online else "no connection to the nats-server"

    @property
    def why(self) -> str:
        """Why a request would not succeed; empty: it would."""
        return self.unready or self._why

    def check(self, peers: Peers) -> None:
        """The living services have changed, or a heartbeat has passed."""
        if self.draining:
            return
        if self._probing is not None and self._probing.done():
            self._probing.result()  # it ended by itself only if it failed as nothing should
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
        if unproven and self._probing is None:  # in turn
            self._last = min(unproven, key=lambda model: (model <= self._last, model))
            self._probing = asyncio.get_running_loop().create_task(self._probe(self._last, peers))

    def doubt(self, why: str, model: str = "") -> None:
        """A request (to a model) did not succeed: it has to be proven again that one would."""
        self._proven -= {model} if model else set(self._proven)
        if not self._proven:
            self._why = why

    def stop(self) -> None:
        """Probe no more."""
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
