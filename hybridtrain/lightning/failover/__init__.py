"""Lost workers: the other workers continue, or a new process takes the worker's place."""
