"""Bulk jobs: files of lines in, files of answers out, whoever dies meanwhile.

feeder       claims jobs for this process, and sends their lines to the runner in fair turns
job_run      one job that this process holds, from its first line to its files
answer_log   answers of a job as they come, for whoever holds it next
line_reader  lines of a file, page by page, and sets of their numbers
turns        lines that are ready, of which tenants take turns
forms        lines to inputs, and replies to records: what the feeder has of an API
folder       the folder with all files
bucket       the same in a bucket
seat_runner  hands lines to the broker as bulk entries, and again those whose batch failed
"""
