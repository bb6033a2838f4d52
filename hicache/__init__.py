"""HiCache: keeps LLM attention state in L1, L2 and L3. This package is what an engine imports."""
