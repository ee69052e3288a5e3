"""From chat messages to text through all five services, beside transformers: prompt ids and greedy answers of
each family, from a folder that transformers wrote and from a GGUF file of the gguf library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.chat_families import FAMILIES, write_folder, write_gguf
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.token_tap import Tap

from shared.nats import subjects

TOKENS = 24
SYSTEM = {"role": "system", "content": "Be brief; it's 2024.\n  - no lists"}
USER = {"role": "user", "content": " What's the naïve café's Größe?  12345 日本語 🎉\n\n\tdef main(args): "}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThe quick  brown fox.\n"}
CHATS = [[USER], [SYSTEM, USER], [SYSTEM, USER, ANSWER, {"role": "user", "content": "Ünd?"}]]
TEXTS = ["The quick brown fox", "  naïve\n\n日本語 1234", "<|im_start|>user\n<s>x</s>", " "]


# A GGUF gets a space before each piece of a SentencePiece text, as in llama.cpp (docs/design/semantics.md)
FORMS = [
    (family, form)
    for family in FAMILIES
    for form in ("folder", "gguf")
    if form == "folder" or FAMILIES[family].spaces != "first"
]


@pytest.mark.parametrize(("family", "form"), FORMS)
async def test_prompts_and_answers_equal_transformers_prompts_and_answers(
    family: str, form: str, tmp_path: Path
) -> None:
    folder = write_folder(family, tmp_path / "m")
    path = folder if form == "folder" else write_gguf(family, tmp_path / "m.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    flags = {"backend": "torch", "dtype": "f32", "model": str(path), "model_name": "m", "kv_blocks": 100}
    pipeline, tap = await Pipeline.start(connect, "beside", **flags), Tap()
    await (await connect()).subscribe("hr.beside.detokenizer.*.in.*", tap.take)
    ask = pipeline.client.request
    for number, messages in enumerate(CHATS):
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        found = await ask(subjects.tokenize("public", "m"), {"messages": messages})
        assert found["tokens"] == wanted, tokenizer.decode(found["tokens"])
        body = {"messages": messages, "model": "m", "temperature": 0, "max_tokens": TOKENS}
        reply = await pipeline.client.complete({**body, "request_id": f"chat-{number}"})
        answer = generated(model, wanted)
        assert tap.ids[f"chat-{number}", 0] == answer
        assert reply["choices"][0]["message"]["content"] == text_of(tokenizer, answer, chat=True)
    for number, text in enumerate(TEXTS):
        found = await ask(subjects.tokenize("public", "m"), {"prompt": text})
        wanted = tokenizer(text)["input_ids"]
        assert found["tokens"] == wanted, text
        body = {"prompt": text, "model": "m", "temperature": 0, "max_tokens": TOKENS}
        reply = await pipeline.client.complete({**body, "request_id": f"text-{number}"})
        answer = generated(model, wanted)
        assert tap.ids[f"text-{number}", 0] == answer
        assert reply["choices"][0]["text"] == text_of(tokenizer, answer, chat=False)
    await pipeline.stop()


def text_of(tokenizer: Any, answer: list[int], chat: bool) -> str:
    """Its decoding. SentencePiece's is written out: transformers has a U+FFFD for every byte beside one that
    is no UTF-8. A chat's answer begins without the space of its first word, a completion goes on with it."""
    if "<unk>" not in tokenizer.all_special_tokens:
        decoded: str = tokenizer.decode(answer, skip_special_tokens=True)
        return decoded
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    tokens = tokenizer.convert_ids_to_tokens([i for i in answer if i not in special])
    spaced = [token.replace("▁", " ").encode() for token in tokens]
    pieces = [bytes.fromhex(p[3:5].decode()) if p.startswith(b"<0x") else p for p in spaced]
    return b"".join(pieces).removeprefix(b" " if chat else b"").decode("utf-8", "replace")


def generated(model: Any, prompt: list[int]) -> list[int]:
    """The greedy answer, the end included."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
    answer: list[int] = whole[0, len(prompt) :].tolist()
    return answer
