"""Bulk jobs: files of lines in, files of answers out, whichever process dies on the way.

jobs         claims jobs for this process, sends their lines to the runner in fair turns, and removes old files
job_run      runs one job that this process holds, from its first line to its files, and logs its answers for the next holder
lines        reads lines of a file, and queues ready lines in fair turns
folder       stores all files in a folder
bucket       stores them in a bucket instead
seat_runner  hands lines to the broker as bulk entries, and runs the lines of failed batches again
"""
