"""Gateway: HTTP in the OpenAI API's shapes to and from the native protocol. A translation, nothing more."""
