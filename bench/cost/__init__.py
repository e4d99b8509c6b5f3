"""What does a request cost: CPU time, memory, rows, Redis calls?"""
