"""The demo: a small real hybrid model served with and without HiCache, and the checks that compare them.

Run it with `python -m examples.demo`. Imports the product; the product never imports it.
"""
