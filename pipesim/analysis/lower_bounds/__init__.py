"""Lower bounds: a time that no order of the tasks of a graph can go below."""
