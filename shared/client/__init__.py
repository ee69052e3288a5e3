"""The native client: requests, a reader that follows one, files through a keeper, long contents in chunks."""
