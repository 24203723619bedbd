"""Learned predictions of output lengths: trained by `scripts/train_length_ranker.py`, used by `sched/predict.py`."""
