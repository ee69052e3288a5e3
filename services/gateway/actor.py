"""The gateway's shell: an HTTP server and a native client in one actor."""

from __future__ import annotations

from services.gateway.app import build_app
from services.gateway.desk import Desk
from services.gateway.health import Health
from services.gateway.keys import Keys
from services.gateway.server import HttpServer, listen
from shared.actor import Actor, Facts
from shared.client import Client
from shared.config import Settings
from shared.errors import SetupError, drain_over
from shared.listening import http_url
from shared.peers import Peer
from shared.port import Port
from shared.readings import Readings


class GatewayActor(Actor):
    """One gateway process."""

    kind = "gateway"
    traced = True

    def __init__(self, address: tuple[str, int], keys: Keys, timeout_s: float) -> None:
        self._address = address
        self._keys = keys
        self._timeout_s = timeout_s
        self._desk: Desk | None = None

    async def start(self, port: Port) -> None:
        self._port = port
        client = await Client.open(port.bus)
        self._desk = Desk(
            client=client,
            keys=self._keys,
            health=Health(client),
            timeout_s=self._timeout_s,
            component=port.source,
            tracer=port.tracer,
            clock=port.clock,
        )
        self._http = HttpServer(build_app(self._desk), listen(*self._address))
        await self._http.start()
        self._look()

    def on_peer(self, peer: Peer) -> None:
        self._look()

    on_peer_gone = on_peer

    def on_broker(self, online: bool) -> None:
        if self._desk is not None:
            self._desk.health.online = online
            self._desk.health.doubt("the nats-server was away just now")
            self._look()

    def upkeep(self) -> None:
        if self._desk is not None:
            self._http.check()
            self._keys.refresh()
            self._look()

    def facts(self) -> Facts:
        if self._desk is None:
            return Facts()
        load = (("http_port", self._http.address[1]), ("active", self._desk.meter.active))
        return Facts(load=load)

    @property
    def readings(self) -> Readings:
        return () if self._desk is None else self._desk.meter.readings()

    def status(self) -> dict[str, object]:
        if self._desk is None:
            return {}
        meter = self._desk.meter
        return {
            "url": http_url(*self._http.address),
            "health": self._desk.health.why or "ok",
            "active": meter.active,
            "requests": meter.requests,
            "chunks": meter.chunks,
            "slow_readers": meter.slow_readers,
        }

    async def drain(self) -> None:
        if self._desk is not None:
            self._desk.health.stop()
            await self._http.drain()

    async def stop(self) -> None:
        if self._desk is not None:
            self._desk.health.stop()
            self._desk.client.fail(drain_over("gateway"))
            await self._http.stop()

    def _look(self) -> None:
        if self._desk is not None:
            self._desk.health.look(self._port.peers)


def build(settings: Settings) -> GatewayActor:
    """The gateway that the configuration asks for. Raises SetupError."""
    address = settings.http_address
    if address is None:
        raise SetupError("the setting `http` is off: give the gateway a host:port")
    return GatewayActor(address, Keys(settings.http_keys), settings.request_timeout_s)
