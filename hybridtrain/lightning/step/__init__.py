"""One optimizer step in a worker: gradients out, parameters in, the user's optimizer as a proxy."""
