"""Where sound comes from: corpora, manifests, synthesis."""
