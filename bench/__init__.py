"""Side-by-side measurements of manyheads against its peers: `python -m bench [PART ...]`.

One file per part, each with a `run(quick)` that returns markdown. `harness` times, `memory`
weighs, `peers` are the others.
"""
