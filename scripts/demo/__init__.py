"""The parts of `scripts/train_demo.py`."""
