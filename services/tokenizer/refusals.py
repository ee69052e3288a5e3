"""The last message of a request that got no further than here, and the spans of its short life."""

from __future__ import annotations

from services.tokenizer.core import Fail
from shared import telemetry
from shared.conventions import COMPONENT
from shared.port import Port
from shared.replies import end_headers, error_reply
from shared.request_spans import RequestFacts, received, root_attributes, root_name
from shared.spans import SpanRecord


def refuse(port: Port, model: str, fail: Fail) -> None:
    """Tell the client, and trace the request if its client or the sampler wants it."""
    headers = end_headers(fail.error, fail.trace)
    port.bus.publish(fail.inbox, error_reply(fail.error, fail.request, fail.trace), headers=headers)
    if port.tracer is not None and fail.origin.parent_span and telemetry.is_sampled(fail.trace):
        spans = refusal_spans(fail, model, port.clock.wall_us(), port.source)
        port.tracer.export(fail.trace, fail.origin.parent_span, spans)


def refusal_spans(fail: Fail, model: str, now_us: int, component: str) -> list[SpanRecord]:
    """The request from its arrival until now: it waited here, then was found wanting, or a scheduler
    refused it or stayed silent."""
    origin = fail.origin
    facts = RequestFacts(
        request=fail.request,
        tenant=origin.tenant,
        model=model,
        format="chat",  # what a request that cannot be read would have been is not known
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
        SpanRecord(root_name(facts), start, end, None, root_attributes(facts), kind="server", error=text),
        received(facts, start, handled),
        SpanRecord(name, handled, end, attributes={COMPONENT: component}),
    ]
