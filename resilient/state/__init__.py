"""What must survive: the state of the training, where it is held, and how it moves.

`protect` is the whole of it for the rest of the worker; the modules below it know less and less
of why: `objects` reads and writes what the user protects, `snapshot` holds copies, `rng` the
random number generators, `transfer` moves a state between ranks, `disk` to and from storage, and
`encoding` turns plain values into bytes.
"""
