"""Commands of the documents, each tried in the state that its reader is in.

pages       code blocks of a page, and the commands in them with what the page shows of their output
answers     what a page shows beside what came
parsing     commands that are parsed, and not run
session     one reader of one page: a folder, a shell's state, what he has started
table       how each command is tried
"""
