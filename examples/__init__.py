"""Programs that use HiCache; nothing here is part of the product."""
