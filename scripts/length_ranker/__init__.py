"""The parts of `scripts/train_length_ranker.py`."""
