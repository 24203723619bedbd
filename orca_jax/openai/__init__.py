"""The OpenAI API without HTTP: from the fields of a call to a generation, and from its tokens to an answer."""
