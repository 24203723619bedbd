"""The HTTP face: a front-end process for text, an engine process for ids, typed messages in between."""
