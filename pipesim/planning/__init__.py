"""Which configuration, and which order of its tasks: search, and proof of how good they are."""
