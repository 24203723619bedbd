"""What `scripts/train_length_ranker.py` is made of."""
