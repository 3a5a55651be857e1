"""Models of other formats: read as this project's own, and written for others to read."""
