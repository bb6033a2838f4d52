"""DECIDES: tokens, pages, columns, tree, coverage, eviction, pins, audit. Pure: no I/O, clock or threads."""
