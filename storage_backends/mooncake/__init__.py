"""Mooncake Store as a storage backend: one store client behind a gate, a keeper that replaces it, a master of
our own where asked. Imports the Mooncake library only when a backend is opened."""
