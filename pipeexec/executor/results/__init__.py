"""Results of a step: losses, times of its tasks, and the merged results of several processes."""
