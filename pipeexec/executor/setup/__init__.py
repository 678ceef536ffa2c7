"""Set up a pipeline: check its arguments, make devices and stages, agree with other processes."""
