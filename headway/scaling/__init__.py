"""Drivers of the autoscaler: each sets the number of workers on one platform. See `headway.ports.ScalingDriver`.

local   makes the pools of workers in this process larger and smaller
none    sets nothing; the number is only published
"""
