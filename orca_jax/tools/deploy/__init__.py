"""Deployment on clusters: replicas of the server in Ray Serve."""
