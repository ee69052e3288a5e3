"""The actors of many fleets in one process share each vocabulary: to build one takes half a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.detokenizer import actor as detokenizer
from services.tokenizer import loading as tokenizer
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary


@pytest.fixture(scope="session", autouse=True)
def one_vocabulary() -> Iterator[None]:
    """Each state of a model's files is loaded once."""
    loaded: dict[tuple[object, ...], Vocabulary] = {}

    def load(files: ModelFiles) -> Vocabulary:
        about = files.path.stat()
        state = (files.path, about.st_ino, about.st_mtime_ns, about.st_size)
        if state not in loaded:
            loaded[state] = load_vocabulary(files)
        return loaded[state]

    with pytest.MonkeyPatch.context() as patch:
        for module in (tokenizer, detokenizer):
            patch.setattr(module, "load_vocabulary", load)
        yield
