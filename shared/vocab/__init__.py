"""Model files as text sees them: vocabulary, tokenizer, GGUF metadata."""
