"""Reads token ids off the wire: the scheduler's messages to the detokenizers, by request and choice."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from shared import codec
from shared.messages import Open, Tokens
from shared.nats.interface import Delivery


class Tap:
    """Subscribe `take` to `hr.<fleet>.detokenizer.*.in.*`. A hole or a double in the ids fails."""

    def __init__(self) -> None:
        self.names: dict[int, tuple[str, int]] = {}
        self.ids: dict[tuple[str, int], list[int]] = defaultdict(list)

    def take(self, delivery: Delivery) -> None:
        """One message."""
        message = codec.decode(delivery.data).message
        if isinstance(message, Open):
            self.names[message.seq] = (message.request, message.choice)
        elif isinstance(message, Tokens):
            tokens = iter(message.ids)
            for seq, first, count in zip(message.seqs, message.first, message.counts, strict=True):
                ids = self.ids[self.names[seq]]
                assert first == len(ids), f"token {first} of {self.names[seq]} came after {len(ids)}"
                ids.extend(islice(tokens, count))
