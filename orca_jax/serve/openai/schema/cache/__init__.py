"""Fields about the cache of prompts, of all APIs."""
