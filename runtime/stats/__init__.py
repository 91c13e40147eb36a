"""What is counted: steps, requests, memory."""
