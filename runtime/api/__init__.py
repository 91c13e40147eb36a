"""What callers of the executor see: requests in, responses out, thread-safe queues between."""
