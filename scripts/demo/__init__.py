"""What `scripts/train_demo.py` is made of."""
