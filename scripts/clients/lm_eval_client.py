# pip: lm-eval[api]
"""lm-eval: its local-chat-completions and local-completions models generate through our API."""

import os

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

base, model = os.environ["BASE_URL"], os.environ["MODEL"]
request = Instance(
    "generate_until",
    {},
    ("The capital of France is", {"until": ["."], "max_gen_toks": 12, "temperature": 0}),
    0,
)
local = LocalCompletionsAPI(
    base_url=f"{base}/completions", model=model, tokenizer_backend=None, num_concurrent=1
)
assert "Paris" in local.generate_until([request], disable_tqdm=True)[0]
chat = LocalChatCompletion(
    base_url=f"{base}/chat/completions", model=model, tokenizer_backend=None, num_concurrent=1
)
asked = chat.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
request = Instance("generate_until", {}, (asked, {"until": [], "max_gen_toks": 20, "temperature": 0}), 0)
assert "Paris" in chat.generate_until([request], disable_tqdm=True)[0]
