"""An engine for encoders, which give vectors of texts."""
