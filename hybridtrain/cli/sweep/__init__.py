"""``--multirun``: a process and a directory for each job."""
