"""What a worker needs of its device's memory, what it may take, what is said where it is full."""
