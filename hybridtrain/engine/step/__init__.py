"""A worker's steps, one kind for each way that an exchange can choose."""
