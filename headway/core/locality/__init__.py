"""Rules for GPUs that hold some, but not all, of several models.

    turns       which model's batch a free GPU runs next
    placement   how much each model is asked, which GPU loads it, and which model makes room

The serving processes and the simulator share these rules.
"""
