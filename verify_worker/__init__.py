"""The verify worker: the target model, its KV, batching and acceptance."""
