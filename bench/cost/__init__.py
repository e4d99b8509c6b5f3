"""What does a request cost: CPU time, memory, rows, calls of Redis?"""
