"""The likeliest tokens behind each beam, with their log-probabilities."""
