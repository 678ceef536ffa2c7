"""Widget of notebooks: a page that takes new steps, and tells Python what is selected in it."""
