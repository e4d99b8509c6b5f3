"""Bulk jobs: a file of lines goes in, and a file of answers comes out, even if processes die in between.

feeder       claims jobs for this process, and sends their lines to the runner in fair turns
jobs         limits what tenants may store, and removes old files
job_run      runs one job held by this process, and logs its answers so that another process can continue it
lines        reads the lines of a file, and queues ready lines in fair turns
folder       stores all files in a folder
bucket       stores them in a bucket instead
seat_runner  sends lines to the broker as bulk entries, and reruns the lines of failed batches
"""
