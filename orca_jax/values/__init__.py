"""Plain values: settings, requests, plans and facts, without arrays."""
