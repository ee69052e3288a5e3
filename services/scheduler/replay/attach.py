"""Gives a running scheduler its log, as the setting `event_log` says."""

from __future__ import annotations

from pathlib import Path

from services.scheduler.core import Scheduler
from services.scheduler.replay.recorder import Recorder
from services.scheduler.replay.sinks import BusSink, FileSink
from shared import subjects
from shared.bus import Delivery
from shared.port import Port

ON_BUS = "nats"  # value of the setting: publish it; anything else is a file


async def attach(core: Scheduler, port: Port, event_log: str, model: str) -> Recorder:
    """The core with its log: in a file, or on the subject of this scheduler, where a request brings a
    snapshot. Raises SetupError for a file that cannot be written."""
    facts = {"scheduler": port.actor, "epoch": port.epoch, "model": model}
    facts["wall_offset_us"] = port.clock.wall_us() - port.clock.now_us()
    if event_log != ON_BUS:
        return Recorder(core, FileSink(Path(event_log)), facts)
    sink = BusSink(port.bus, subjects.events(port.actor))
    recorder = Recorder(core, sink, facts)

    def on_asked(asked: Delivery) -> None:
        recorder.begin(port.clock.now_us())
        sink.push()  # at once: an idle scheduler has no event that would take it along
        if subjects.is_inbox(asked.reply):
            port.bus.publish(asked.reply, b"")

    await port.bus.subscribe(subjects.events_snapshot(port.actor), on_asked)
    return recorder
