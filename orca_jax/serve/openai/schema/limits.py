"""Limits of single fields, shared by the tables of fields, the documents and the checks."""

from orca_jax.values.request import MAX_CANDIDATES

MAX_PROMPTS = 1024  # in one call
MAX_CHOICES = MAX_CANDIDATES  # for n and best_of
MAX_ANSWERS = 1024  # prompts times candidates: engine requests of one call
MAX_STOP_STRINGS = 32  # OpenAI's is 4; front ends for stories and characters send more
MAX_STOP_CHARACTERS = 1024
# characters of all stop strings of a call; each piece of text is compared with all of them
MAX_ALL_STOPS = 4096
MAX_STOP_IDS = 128
MAX_BAD_WORDS = 128
MAX_CHOICE_STRINGS = 1024  # of structured_outputs.choice
MAX_MESSAGES = 4096
MAX_PARTS = 256
MAX_TOOLS = 128  # OpenAI's
MAX_NAME = 1024  # characters of a user or salt
MAX_PROMPT_IDS = 2**20  # token ids in one list; far beyond any context
# in a body; the parser holds the interpreter's lock, for about 50 ms with these limits
MAX_VALUES = 1_200_000
MAX_CONTAINERS = 200_000  # lists and objects in a body; they take longer to parse than numbers
MAX_STRINGS = 200_000  # keys and values in a body; each takes 50 bytes beside its text
MAX_SECONDS = 86_400.0
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for completions
INT64 = 2**63 - 1
