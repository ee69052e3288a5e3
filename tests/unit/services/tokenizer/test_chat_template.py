"""Chats become prompt ids as the model's own tokenizer has them, and what a user writes stays text."""

from __future__ import annotations

from pathlib import Path

from support.text_models import write_hf_folder
from tokenizers import Tokenizer

from services.tokenizer.actor import load_model
from shared.config import Settings

WALL_US = 1_700_000_000_000_000
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "It's 2024: naïve café?"},
]


def test_a_folder_is_prompted_with_its_control_tokens(tmp_path: Path) -> None:
    """In the order of a tokenizer process: both forms of encoding are warmed up first."""
    folder = write_hf_folder(tmp_path / "m")
    model = load_model(Settings(model=str(folder)))
    text = model.template.render(CHAT, True, WALL_US)
    wanted = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert wanted.count(1) == 3  # <|im_start|>
    assert model.template.encode(CHAT, None, True, WALL_US) == wanted
    assert model.vocabulary.encode(text, special=True) == wanted
