"""Real processes, real sockets and the faults they meet."""
