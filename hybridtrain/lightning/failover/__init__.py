"""A worker that is lost: the others go on, and another process takes its place."""
