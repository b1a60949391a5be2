"""One memory per node: engines share a pool that outlives the engines.

`layout.py` has the records and their offsets in the memory, `segment.py` the memory, and `ledger.py` the journal and
the slot table. `keeper.py` makes the holder's decisions, and `holder.py` is the holder's process. `client.py` is an
engine's side, and `connect.py` finds or starts a holder. Decision 41 has the reasons.
"""
