"""Text: tokenizers, chat templates, grammars, tool calls, and decoding of generated ids."""
