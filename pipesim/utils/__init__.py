"""Arrays, compiled loops, texts and files: what knows nothing of pipelines."""
