"""Small models trained here, to measure on: their attention is real, and so is what they look up.

`recipes` says what is trained; `books`, `corpus`, `synthetic` and `batches` make the tokens;
`model`, `schedule` and `checkpoints` are the training; `export` writes a Hugging Face folder.
Commands: `train`, `report`, and `on_gpu`, which does everything in limited time.
"""
