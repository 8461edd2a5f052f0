"""The shared vocabulary: frozen dataclasses, standard library only.

`graph` what must be computed, `plan` in which order, `costs` how long each part takes,
`timeline` what happened or would happen, `store` these as JSON files.
"""
