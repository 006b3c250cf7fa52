"""The paper's accuracy figures (InfiniGen, OSDI 2024) as commands for any model.

    python -m benchmarks.figures NAME --model DIR --text F --json F --plot F

--help lists them. Each sets defaults for the options of `infinigen_jax.evaluate`, all of which
remain, and adds a table and a diagram. Where the paper reports accuracy on tasks, --tasks (of
lm-eval) replaces --text.
"""
