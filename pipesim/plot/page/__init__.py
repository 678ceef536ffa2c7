"""Interactive pages: timelines, schedules and graphs in one HTML file, with its own program."""
