"""Token mixers: the parts of a layer in which a token sees others, such as attention."""
