"""Messages within one memory that take a chosen link's time, and CPU workers with such links."""
