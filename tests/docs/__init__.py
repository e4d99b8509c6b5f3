"""Tries each command of the documents in the state that its reader is in.

pages       code blocks of a page, and the commands in them with the output that the page shows
answers     compares the output that a page shows with the real one
parsing     commands that are only parsed
session     one reader of one page: a folder, a shell's state, started services
table       how each command is tried
"""
