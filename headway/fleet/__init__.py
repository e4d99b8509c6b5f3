"""The processes of a fleet.

membership   one process's place in it
reaper       ends what has run out of time
"""
