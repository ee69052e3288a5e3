"""The shapes of the OpenAI API that not only the gateway reads and writes."""
