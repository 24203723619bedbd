"""`POST /v1/responses`: a conversion to chats and back, and the store of responses."""
