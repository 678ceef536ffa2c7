"""Orders of tasks: search, and proof of how good they are."""
