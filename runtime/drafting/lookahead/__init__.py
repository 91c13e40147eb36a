"""Lookahead decoding: the target guesses tokens ahead, which become n-grams that it verifies."""
