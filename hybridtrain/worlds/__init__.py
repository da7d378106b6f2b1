"""Where a run takes place: processes on this host."""
