"""Bulk jobs: files of lines in, files of answers out, whichever process dies on the way.

feeder       claims jobs for this process and sends their lines to the runner in fair turns
job_run      runs one job that this process holds, from its first line to its files
lines        reads lines of a file, and queues ready lines in fair turns
answer_log   records a job's answers as they come, for its next holder
folder       stores all files in a folder
bucket       stores them in a bucket instead
seat_runner  hands lines to the broker as bulk entries, and runs the lines of failed batches again
jobs         everything of one process, and the removal of old files
"""
