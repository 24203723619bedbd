"""The OpenAI API without HTTP: turns the fields of a call into engine requests, and their tokens into an answer."""
