"""Bodies and answers of decisions: OpenAI's and SGLang's on one route, and TypeSafe's on another."""
