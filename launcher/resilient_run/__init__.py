"""The launcher: `resilient-run`, a torchrun whose workers survive each other's faults.

The map, from the outside in: `cli` turns a command line into `options`; `agent` is the event loop
around the pure coordinator; `workers` is a worker as the agent sees it, `zygote` the process that
forks them (`hugepages` makes that cheap), `bootstrap` what happens in a worker before the user's
script. The agent's own: `stores` (a TCPStore a generation), `environment` and `logs` of a worker,
`heritage` (what outlives one), `scratch` (its temporary files), `watch` and `evidence` (of one that
stands still or has ended), `journal`, `status` and `console`.
"""
