"""Loading models and running them over paged KV."""
