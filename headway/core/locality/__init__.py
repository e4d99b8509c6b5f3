"""Rules for GPUs that hold several models but not all: what runs next, what is loaded where, what makes room.

    turns       which model's batch a free GPU runs next
    demand      what is asked of each model, and what loading it costs
    placement   which models are loaded on which GPU, and which make room

The parts of a process that serves, and the simulator, drive the same objects.
"""
