"""The real all-MiniLM-L6-v2: vectors of short and long texts are those of sentence-transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support.memory_bus import MemoryBroker
from support.minilm import minilm_folder
from support.pipeline.five_actors import Pipeline

from shared.errors import BadRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")
MOST_TOKENS = 256  # its sentence_bert_config.json; it has 512 positions
SENTENCE = "The Quick brown fox jumps over the lazy dog, and prices rose by 12.5 %. "


async def test_a_text_is_cut_where_sentence_transformers_cuts_it() -> None:
    folder, broker = minilm_folder(), MemoryBroker()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)

    def wanted(text: str, most: int) -> torch.Tensor:
        ids = tokenizer(text, truncation=True, max_length=most, return_tensors="pt").input_ids
        with torch.no_grad():
            mean = model(ids).last_hidden_state[0].mean(0)
        return mean / mean.norm()

    async def connect() -> Any:
        return broker.connect()

    flags = {"backend": "torch", "dtype": "f32", "model": str(folder), "model_name": "m"}
    pipeline = await Pipeline.start(connect, "minilm", **flags)
    for more, over in ((0, False), (20, True), (45, True), (2_000, True)):
        text = SENTENCE * 10 + "Cats sleep under warm stars. " * more
        found = torch.tensor(await pipeline.client.embed({"model": "m", "input": text}))
        assert float(found @ wanted(text, MOST_TOKENS)) > 0.99999
        assert (float(found @ wanted(text, 512)) < 0.99) == over
    with pytest.raises(BadRequest, match=r"maximum context length is 256 tokens.*leave out `truncate`"):
        await pipeline.client.embed({"model": "m", "input": SENTENCE * 20, "truncate": False})
    await pipeline.assert_idle()
    await pipeline.stop()
