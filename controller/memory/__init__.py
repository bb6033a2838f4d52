"""Memory: frame layout, the host slab, the engines' mapped regions."""
