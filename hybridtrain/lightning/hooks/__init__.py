"""Private names of Lightning's, behind plain ones: nobody else touches them."""
