"""Bulk jobs: files of lines in, files of answers out, whichever process dies on the way.

feeder       claims jobs for this process, and sends their lines to the runner in fair turns
job_run      one job that this process holds, from its first line to its files
answer_log   answers of a job as they come, for its next holder
line_reader  lines of a file, page by page, and sets of their numbers
turns        lines that are ready; tenants take turns
forms        from lines to inputs and from replies to records: what an API provides
folder       the folder with all files
bucket       the same in a bucket
seat_runner  hands lines to the broker as bulk entries, and again those whose batch failed
"""
