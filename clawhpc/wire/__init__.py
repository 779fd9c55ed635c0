"""Wire protocols: the body of a request becomes a `Conversation`, a `Reply` becomes a body or a stream of events.

Pure: no I/O, no clock, no tokens.
"""
