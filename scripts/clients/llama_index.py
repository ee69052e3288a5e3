# pip: llama-index-llms-openai-like
"""llama-index: complete, chat, stream."""

import os
import sys

sys.path.pop(0)  # this script has the package's name
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=os.environ["MODEL"],
    api_base=os.environ["BASE_URL"],
    api_key="any",
    is_chat_model=True,
    temperature=0,
    max_tokens=20,
    max_retries=0,
    context_window=2048,
)
asked = [ChatMessage(role="user", content="What is the capital of France?")]
answer = llm.chat(asked).message.content
assert "Paris" in answer
assert list(llm.stream_chat(asked))[-1].message.content == answer
assert "Paris" in llm.complete("What is the capital of France?").text
