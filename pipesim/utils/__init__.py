"""Arrays, compiled loops, texts and files: helpers that know nothing of pipelines."""
