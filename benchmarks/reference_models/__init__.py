"""Small models trained on real text and lookup tasks, for measurements with realistic attention.

`recipes` describes the training; `books`, `corpus`, `synthetic` and `batches` make the tokens;
`model`, `induction`, `schedule` and `checkpoints` train; `export` writes a Hugging Face
folder. The command is `python -m benchmarks.reference_models.train`.
"""
