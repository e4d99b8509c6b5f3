"""Services that keep a fleet of processes together.

membership   one process's place in the fleet
reaper       ends what has run out of time
"""
