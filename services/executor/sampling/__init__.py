"""From logits to tokens: sampling, grammars, logits processors."""
