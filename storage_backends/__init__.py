"""STORES opaque key -> frame bytes. Knows no other part of HiCache."""
