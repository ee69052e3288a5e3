"""The tokenizer validates public requests and turns their text into token ids."""
