"""Starting, watching and ending worker processes, and naming the rank that failed.

May import the pure packages of toolkit; torch only inside forked processes.
"""
