"""`antiphon bench serve`: load on a server, and what callers see of it.

`command` is the front, `processes` runs what is loaded and who loads it, `worker` is the latter's
process, `drive` keeps the load up, `asking` makes the requests, `figures` sums up, `show` shows.
"""
