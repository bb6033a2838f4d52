"""Transfers: jobs and their states, copy engines, the order of copies."""
