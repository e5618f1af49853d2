"""Code generated from `protos/`."""
