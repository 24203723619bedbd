"""The playground: a page to try the model, and to see the iterations of the engine as they happen."""
