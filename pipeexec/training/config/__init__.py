"""Train from a TOML file: read and check it, and make pipeline, data and options."""
