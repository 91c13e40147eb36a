"""What every operator and backend shares: specs, the table of operators, calls, random examples."""
