"""The likeliest ids of rows of logits that ranks have shares of."""
