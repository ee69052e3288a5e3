# pip: ollama
"""ollama: chat, stream, generate, format, list."""

import json
import os

import ollama

client = ollama.Client(host=os.environ["ROOT_URL"])
model = os.environ["MODEL"]
asked = [{"role": "user", "content": "What is the capital of France?"}]
options = {"temperature": 0, "num_predict": 20}
whole = client.chat(model=model, messages=asked, options=options)
assert "Paris" in whole.message.content
assert whole.eval_count > 0
assert (
    "".join(
        part.message.content
        for part in client.chat(model=model, messages=asked, options=options, stream=True)
    )
    == whole.message.content
)
assert client.generate(model=model, prompt="Paris is", options=options).response
schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
typed = client.chat(model=model, messages=asked, options={"temperature": 0, "num_predict": 60}, format=schema)
assert isinstance(json.loads(typed.message.content)["n"], int)
assert model in [each.model.removesuffix(":latest") for each in client.list().models]
