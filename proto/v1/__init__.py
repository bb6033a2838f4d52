"""SPEAKS: the wire contract and its generated code (committed, never edited)."""
