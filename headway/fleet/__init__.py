"""Services by which the processes of a fleet work together."""
