"""What is checked before any process is started."""
