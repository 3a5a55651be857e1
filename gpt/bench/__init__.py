"""`antiphon bench`: the numbers that the project claims, measured again on any machine.

`command` has the table of subcommands. What all of them share: `rounds` (things that are compared
take turns), `memory` (the peak of a piece of work, in a process of its own) and `output` (facts of
the machine, tables, JSON, plots).
"""
