"""Find useless and missing all-reduces of gradients, in a running loop, a trace or a timeline."""
