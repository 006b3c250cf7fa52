"""Small models trained here to measure on: they look things up, and their attention is real.

`recipes` says what is trained; `books`, `corpus`, `synthetic` and `batches` make the tokens;
`model`, `induction`, `schedule` and `checkpoints` are the training; `export` writes a Hugging Face
folder. The command is `python -m benchmarks.reference_models.train`.
"""
