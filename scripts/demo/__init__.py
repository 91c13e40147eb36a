"""What `scripts/demo/train.py` and `scripts/demo/evaluate.py` are made of."""
