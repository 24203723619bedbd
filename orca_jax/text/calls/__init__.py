"""The forms of tool calls in generated text: their parsers and their grammars."""
