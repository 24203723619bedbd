"""The HTTP server: a front-end process for text, an engine process for token ids, typed messages between them."""
