"""Quality, speed and memory of quantised weights and KV caches."""
