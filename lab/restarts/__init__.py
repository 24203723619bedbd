"""Engines that are killed under load: each call ends with the answer that it would have had."""
