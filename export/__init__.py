"""What is taken home: a run as a script or a notebook that needs nothing of this project, its numbers as a table."""
