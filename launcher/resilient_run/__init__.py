"""The launcher: `resilient-run`, a torchrun whose workers survive each other's faults.

The map, from the outside in: `cli` turns a command line into options; `agent` is the event loop
around the pure coordinator; `workers` is a worker as the agent sees it, `zygote` the process that
forks them, `bootstrap` what happens in a worker before the user's script; `stores`, `logs`,
`evidence`, `journal`, `status` and `console` do what their names say.
"""
