"""`headrace run MODEL [PROMPT]` answers a prompt, or chats, with a fleet that it starts if none runs.

The fleet stays in the background for the next call, see background.py. A model that is not on this machine is
fetched first. With the setting `nats_url` the fleet there is used, and nothing is started.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from services.launcher import background, console
from services.launcher.commands.chat import Conversation, ask_once, converse
from services.launcher.commands.pull import pull
from services.launcher.session import Target
from shared.config import Loaded, Settings
from shared.errors import SetupError
from shared.vocab.files import can_be_pulled, resolve, served_names


def run(loaded: Loaded, words: Sequence[str], said: Conversation) -> None:
    """Answer the prompt: `words`, then stdin if it is not a terminal. Without a prompt on a terminal: a chat.
    An empty prompt only starts the fleet. Raises SetupError, and the request's error."""
    timeout_s = loaded.settings.request_timeout_s
    interactive = sys.stdin is not None and sys.stdin.isatty()
    piped = "" if interactive or sys.stdin is None else sys.stdin.read().strip()
    prompt = "\n\n".join(filter(None, (" ".join(words), piped)))
    with _target(loaded) as target:
        if prompt:
            asyncio.run(ask_once(target, prompt, said, timeout_s))
        elif interactive and not words:
            converse(target, said, timeout_s)


@contextmanager
def _target(loaded: Loaded) -> Generator[Target]:
    settings = loaded.settings
    name = served_names(settings)[0]
    if settings.nats_url:
        yield Target(settings.nats_url, name)
        return
    status = console.StatusLine(sys.stderr)
    with status, background.fleet_of(loaded, lambda: _fetch(settings), status.show) as fleet:
        status.clear()
        if name not in fleet.models:
            raise SetupError(
                f"fleet {fleet.fleet} serves {', '.join(fleet.models)}, not {name}: end it with "
                f"`headrace stop`, or start {name} beside it with --fleet NAME"
            )
        yield Target(fleet.nats_url, name)


def _fetch(settings: Settings) -> None:
    """Fetch the model unless it is here. Raises SetupError."""
    try:
        resolve(settings.model, settings.cache_dir)
    except SetupError:
        if not can_be_pulled(settings.model) or Path(settings.model).exists():
            raise
        pull(settings.model, settings.cache_dir, lambda text: print(text, file=sys.stderr, flush=True))
