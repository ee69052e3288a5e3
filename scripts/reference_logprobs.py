"""Writes the log probabilities of the answers to the reference prompts, by transformers in float32.

    pip install accelerate                  # transformers needs it to read a GGUF file
    python scripts/reference_logprobs.py    # writes tests/data/smollm2_logprobs.json; a minute or two

transformers reads the GGUF file itself, independent of Headrace's code. The test that compares
(tests/e2e/test_real_answers.py) then needs no transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.config import load
from shared.vocab.files import CATALOGUE, DEFAULT_MODEL, models_dir

if TYPE_CHECKING:
    from torch import Tensor


DATA = Path(__file__).parents[1] / "tests" / "data"
TOP = 8  # more than the test asks for: neighbours that are almost equal may change places


def position(table: Tensor, chosen: int) -> dict[str, Any]:
    """One token: its log probability, and the likeliest ones in falling order. `table` is `[vocab]`."""
    top = table.topk(TOP)
    return {
        "id": chosen,
        "logprob": round(table[chosen].item(), 7),
        "top_ids": top.indices.tolist(),
        "top_logprobs": [round(value, 7) for value in top.values.tolist()],
    }


def main() -> None:
    """Compute and write."""
    import torch
    import transformers

    path = models_dir(load().settings.cache_dir) / CATALOGUE[DEFAULT_MODEL].file
    cases = json.loads((DATA / "smollm2_greedy.json").read_text())["cases"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    made = []
    for case in cases:
        prompt, output = case["prompt_ids"], case["output_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        tables = logits.double().log_softmax(-1)
        answer = [position(table, token) for table, token in zip(tables, output, strict=True)]
        made.append({"prompt": case["prompt"], "prompt_tokens": len(prompt), "answer": answer})
    heading = {
        "model": path.name,
        "made_by": f"scripts/reference_logprobs.py: transformers {transformers.__version__}, float32",
    }
    lines = ",\n".join("    " + json.dumps(case) for case in made)
    text = f'{json.dumps(heading)[:-1]}, "cases": [\n{lines}\n]}}\n'
    (DATA / "smollm2_logprobs.json").write_text(text)


if __name__ == "__main__":
    main()
