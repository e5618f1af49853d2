"""The draft worker: holds drafters and their KV, and proposes tokens to verify workers."""
