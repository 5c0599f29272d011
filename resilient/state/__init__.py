"""What must survive: the state of the training, where it is held, and how it moves.

`protect` is the whole of it for the rest of the worker; the modules below it know less and less
of why: `objects` reads and writes what the user protects (`optimizers` the largest part of it),
`snapshot` holds copies, `generators` the random number generators, which `rng` reads and writes,
`transfer` moves a state between ranks, `disk` to storage and `stored` back from it, and `encoding`
turns plain values into bytes.
"""
