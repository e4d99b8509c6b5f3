"""What does a policy do with traffic? Under virtual time, without a process or a socket."""
