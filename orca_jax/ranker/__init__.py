"""Learned predictions of lengths: trained by `scripts/train_length_ranker.py`, asked by `sched/predict.py`."""
