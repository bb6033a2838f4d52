"""The engine's side of the wire: shared regions, the Attach stream, deadlines."""
