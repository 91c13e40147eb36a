"""Drafts from the target itself: tokens that it guesses ahead become n-grams that it verifies."""
