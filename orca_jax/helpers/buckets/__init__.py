"""Models in buckets and on web servers: names, folders with their small files, and objects read by range."""
