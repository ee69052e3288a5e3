"""The logits processors that a fleet offers: the setting `logits_processors`, read by tokenizers (names) and
executors (code) alike. A request can only name what is listed there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shared.errors import SetupError

PROCESSOR_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
_TARGET = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")


def processor_targets(setting: str) -> Mapping[str, str]:
    """`name=module:attribute,...` as {name: "module:attribute"}. Raises SetupError."""
    targets: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        name, _, target = (part.strip() for part in entry.partition("="))
        if not re.fullmatch(PROCESSOR_NAME, name) or not _TARGET.fullmatch(target):
            raise SetupError(
                f"logits_processors: {entry!r:.120} is not name=module:attribute; write for example "
                "no_digits=my_package.processors:NoDigits"
            )
        if name in targets:
            raise SetupError(f"logits_processors: {name!r} is listed twice; rename one")
        targets[name] = target
    return targets
