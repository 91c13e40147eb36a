"""What `scripts/train_demo_models.py` and `scripts/evaluate_demo_models.py` are made of."""
