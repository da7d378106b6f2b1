"""Where a run takes place: processes of this host and others, threads, virtual time."""
