"""Services that keep a fleet of processes together.

membership         one process's place in the fleet
pace               how often a process tells of itself, and looks at the others
models             the models that the workers of the fleet bring
reaper             ends what has run out of time
board_reporter     tells the departure board what a process does
local_scaling      sets the workers of this process, and takes its share of those that there should be
"""
